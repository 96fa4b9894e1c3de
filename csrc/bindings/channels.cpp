// Channels, messages and memory that processes share, as Python sees them. Stages send and receive
// in the engine; Python measures links.
#include "bindings/bindings.h"
#include "engine/channels/device_memory_sharing.h"
#include "engine/channels/device_ring.h"
#include "engine/channels/local_channel.h"
#include "engine/channels/process_group_channel.h"
#include "engine/channels/staged_channel.h"
#include "engine/process_group.h"
#include "transport/shared_board.h"
#include "transport/shared_ring.h"

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace pd2 {
namespace {

using Seconds = std::chrono::duration<double>;
template <typename T>
using OfPython = std::conditional_t<std::is_same_v<T, Seconds>, double, T>;

// For Python, where seconds are a number: None in place of null.
template <typename T, typename... Arguments>
auto or_none(std::unique_ptr<T> (*make)(Arguments...)) {
  return [make](OfPython<Arguments>... given) {
    std::unique_ptr<T> made = make(Arguments(given)...);
    return made ? std::optional<std::shared_ptr<T>>(std::move(made)) : std::nullopt;
  };
}

// None without a ring. To end it the device must be waited for.
template <typename End>
std::optional<std::shared_ptr<End>> end_of_device_ring(std::unique_ptr<DeviceRing> ring,
                                                       c10::Device device, int peer_rank) {
  if (!ring) return std::nullopt;
  return std::shared_ptr<End>(new End(std::move(ring), device, peer_rank), delete_without_gil<End>);
}

}  // namespace

void bind_shared_memory(py::module_& module) {
  py::class_<SharedRing, std::shared_ptr<SharedRing>>(module, "SharedRing")
      .def_static("create", or_none(&SharedRing::create), py::arg("num_slots"), py::arg("timeout"))
      .def_static("open", or_none(&SharedRing::open), py::arg("address"), py::arg("timeout"))
      .def_property_readonly("address", &SharedRing::address);
  py::class_<SharedBoard, std::shared_ptr<SharedBoard>>(module, "SharedBoard")
      .def_static("create", or_none(&SharedBoard::create), py::arg("num_ranks"),
                  py::arg("row_size"), py::arg("timeout"))
      .def_static("open", or_none(&SharedBoard::open), py::arg("address"), py::arg("rank"),
                  py::arg("timeout"))
      .def_property_readonly("address", &SharedBoard::address)
      .def(
          "begin_exchange",
          [](SharedBoard& self, const std::vector<std::int64_t>& row) { self.begin_exchange(row); },
          py::arg("row"))
      .def(
          "finish_exchange",
          [](SharedBoard& self, double timeout) {
            return self.finish_exchange(SharedBoard::Timeout(timeout));
          },
          py::arg("timeout"), py::call_guard<py::gil_scoped_release>())
      .def("leave", &SharedBoard::leave);
}

namespace {

void bind_ends(py::module_& module) {
  py::class_<Sender, std::shared_ptr<Sender>>(module, "Sender")
      .def(
          "send",
          [](Sender& self, LayoutId layout, std::vector<at::Tensor> tensors) {
            Message message;
            message.requires_grad.assign(tensors.size(), false);
            message.tensors = std::move(tensors);
            self.send(layout, std::move(message));
          },
          py::arg("layout"), py::arg("tensors"), py::call_guard<py::gil_scoped_release>());
  py::class_<Receiver, std::shared_ptr<Receiver>>(module, "Receiver")
      .def("expect", &Receiver::expect, py::arg("layout"), py::call_guard<py::gil_scoped_release>())
      .def("post", &Receiver::post, py::call_guard<py::gil_scoped_release>())
      .def(
          "receive", [](Receiver& self) { return self.receive().tensors; },
          py::call_guard<py::gil_scoped_release>());
}

void bind_device_rings(py::module_& module) {
  bind_registration<DeviceMemorySharing>(module, "register_device_memory_sharing");
  py::class_<DeviceRingSender, Sender, std::shared_ptr<DeviceRingSender>>(module,
                                                                          "DeviceRingSender")
      .def_static(
          "create",
          [](c10::Device device, std::uint32_t num_slots, int peer_rank, double timeout) {
            return end_of_device_ring<DeviceRingSender>(
                DeviceRing::create(device, num_slots, timeout), device, peer_rank);
          },
          py::kw_only(), py::arg("device"), py::arg("num_slots"), py::arg("peer_rank"),
          py::arg("timeout"))
      .def_property_readonly("is_idle", &DeviceRingSender::is_idle)
      .def_property_readonly("address", &DeviceRingSender::address);
  py::class_<DeviceRingReceiver, Receiver, std::shared_ptr<DeviceRingReceiver>>(
      module, "DeviceRingReceiver")
      .def_static(
          "open",
          [](const std::string& address, c10::Device device, int peer_rank, double timeout) {
            return end_of_device_ring<DeviceRingReceiver>(
                DeviceRing::open(address, device, timeout), device, peer_rank);
          },
          py::arg("address"), py::kw_only(), py::arg("device"), py::arg("peer_rank"),
          py::arg("timeout"))
      .def_property_readonly("is_idle", &DeviceRingReceiver::is_idle);
}

// `headers`: a group's name, the other end's number in it and a tag.
void bind_peer(py::module_& module) {
  using Headers = std::tuple<std::string, int, int>;
  py::class_<Peer>(module, "Peer")
      .def(py::init([](const std::string& group, int number, int rank, c10::Device device,
                       std::shared_ptr<SharedRing> ring, const std::optional<Headers>& headers,
                       bool pins_memory) {
             Peer peer{resolve_group(group), number, rank, device, std::move(ring)};
             if (headers) {
               const auto& [hosts, number_there, tag] = *headers;
               peer.headers = HeaderPath{resolve_group(hosts), number_there, tag};
             }
             peer.pins_memory = pins_memory;
             return peer;
           }),
           py::kw_only(), py::arg("group"), py::arg("number"), py::arg("rank"), py::arg("device"),
           py::arg("ring"), py::arg("headers"), py::arg("pins_memory"));
}

}  // namespace

void bind_channels(py::module_& module) {
  bind_ends(module);
  bind_peer(module);
  bind_device_rings(module);
  module.def(
      "abort_on_fault",
      [](const std::shared_ptr<Fault>& fault, const std::string& group) {
        abort_on_fault(*fault, resolve_group(group));
      },
      py::arg("fault"), py::arg("group"), py::call_guard<py::gil_scoped_release>());
  py::class_<LocalChannel, Sender, Receiver, std::shared_ptr<LocalChannel>>(
      module, "LocalChannel", py::multiple_inheritance())
      .def(py::init<c10::Device, c10::Device>(), py::kw_only(), py::arg("source"),
           py::arg("destination"));
  py::class_<ProcessGroupSender, Sender, std::shared_ptr<ProcessGroupSender>>(module,
                                                                              "ProcessGroupSender")
      .def(py::init<Peer, std::size_t>(), py::kw_only(), py::arg("peer"), py::arg("max_unawaited"))
      .def("connect", &ProcessGroupSender::connect, py::call_guard<py::gil_scoped_release>());
  py::class_<ProcessGroupReceiver, Receiver, std::shared_ptr<ProcessGroupReceiver>>(
      module, "ProcessGroupReceiver")
      .def(py::init<Peer, std::size_t>(), py::kw_only(), py::arg("peer"), py::arg("posted_ahead"))
      .def("connect", &ProcessGroupReceiver::connect, py::call_guard<py::gil_scoped_release>());
  py::class_<StagedSender, Sender, std::shared_ptr<StagedSender>>(module, "StagedSender")
      .def(py::init(
               [](std::shared_ptr<Sender> hosts, c10::Device device, std::shared_ptr<Fault> fault) {
                 return std::shared_ptr<StagedSender>(
                     new StagedSender(std::move(hosts), device, std::move(fault)),
                     delete_without_gil<StagedSender>);
               }),
           py::kw_only(), py::arg("hosts"), py::arg("device"), py::arg("fault"));
  py::class_<StagedReceiver, Receiver, std::shared_ptr<StagedReceiver>>(module, "StagedReceiver")
      .def(py::init<std::shared_ptr<Receiver>, c10::Device>(), py::kw_only(), py::arg("hosts"),
           py::arg("device"));
}

}  // namespace pd2
