// Channels, messages and memory that processes share, as Python sees them. Stages send and receive
// in the engine; Python measures links.
#include "bindings/bindings.h"
#include "engine/channels/local_channel.h"
#include "engine/channels/process_group_channel.h"
#include "transport/shared_board.h"
#include "transport/shared_ring.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace pd2 {
namespace {

// Python's None if there is none.
template <typename T>
std::shared_ptr<T> or_none(std::unique_ptr<T> object) {
  return std::shared_ptr<T>(std::move(object));
}

void bind_shared_memory(py::module_& module) {
  py::class_<SharedRing, std::shared_ptr<SharedRing>>(module, "SharedRing")
      .def_static(
          "create",
          [](std::uint32_t num_slots, double timeout) {
            return or_none(SharedRing::create(num_slots, SharedRing::Timeout(timeout)));
          },
          py::arg("num_slots"), py::arg("timeout"))
      .def_static(
          "open",
          [](const std::string& address, double timeout) {
            return or_none(SharedRing::open(address, SharedRing::Timeout(timeout)));
          },
          py::arg("address"), py::arg("timeout"))
      .def_property_readonly("address", &SharedRing::address);
  py::class_<SharedBoard, std::shared_ptr<SharedBoard>>(module, "SharedBoard")
      .def_static(
          "create",
          [](int num_ranks, int row_size, double timeout) {
            return or_none(SharedBoard::create(num_ranks, row_size, SharedBoard::Timeout(timeout)));
          },
          py::arg("num_ranks"), py::arg("row_size"), py::arg("timeout"))
      .def_static(
          "open",
          [](const std::string& address, int rank, double timeout) {
            return or_none(SharedBoard::open(address, rank, SharedBoard::Timeout(timeout)));
          },
          py::arg("address"), py::arg("rank"), py::arg("timeout"))
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
      .def(
          "receive", [](Receiver& self) { return self.receive().tensors; },
          py::call_guard<py::gil_scoped_release>());
}

}  // namespace

void bind_channels(py::module_& module) {
  bind_shared_memory(module);
  bind_ends(module);
  py::class_<LocalChannel, Sender, Receiver, std::shared_ptr<LocalChannel>>(
      module, "LocalChannel", py::multiple_inheritance())
      .def(py::init<c10::Device>(), py::arg("destination"));
  py::class_<ProcessGroupSender, Sender, std::shared_ptr<ProcessGroupSender>>(module,
                                                                              "ProcessGroupSender")
      .def(py::init([](const std::string& group, int peer, int peer_rank, c10::Device device,
                       std::size_t max_unawaited, std::shared_ptr<SharedRing> ring) {
             return std::make_shared<ProcessGroupSender>(
                 Peer{resolve_group(group), peer, peer_rank, device, std::move(ring)},
                 max_unawaited);
           }),
           py::kw_only(), py::arg("group"), py::arg("peer"), py::arg("peer_rank"),
           py::arg("device"), py::arg("max_unawaited"), py::arg("ring"));
  py::class_<ProcessGroupReceiver, Receiver, std::shared_ptr<ProcessGroupReceiver>>(
      module, "ProcessGroupReceiver")
      .def(
          py::init([](const std::string& group, int peer, int peer_rank, c10::Device device,
                      std::size_t posted_ahead, std::shared_ptr<SharedRing> ring) {
            return std::make_shared<ProcessGroupReceiver>(
                Peer{resolve_group(group), peer, peer_rank, device, std::move(ring)}, posted_ahead);
          }),
          py::kw_only(), py::arg("group"), py::arg("peer"), py::arg("peer_rank"), py::arg("device"),
          py::arg("posted_ahead"), py::arg("ring"));
}

}  // namespace pd2
