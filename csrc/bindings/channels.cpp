// Channels and messages, as Python sees them. Stages send and receive in the engine; Python
// measures links.
#include "bindings/bindings.h"
#include "engine/channels/local_channel.h"
#include "engine/channels/process_group_channel.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace pd2 {
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
      .def(
          "receive", [](Receiver& self) { return self.receive().tensors; },
          py::call_guard<py::gil_scoped_release>());
}

}  // namespace

void bind_channels(py::module_& module) {
  bind_ends(module);
  py::class_<LocalChannel, Sender, Receiver, std::shared_ptr<LocalChannel>>(
      module, "LocalChannel", py::multiple_inheritance())
      .def(py::init<c10::Device>(), py::arg("destination"));
  py::class_<ProcessGroupSender, Sender, std::shared_ptr<ProcessGroupSender>>(module,
                                                                              "ProcessGroupSender")
      .def(
          py::init([](const std::string& group, int peer, int peer_rank, c10::Device device,
                      std::size_t max_unawaited, std::shared_ptr<SharedRing> ring) {
            return std::make_shared<ProcessGroupSender>(Peer{resolve_group(group), peer, peer_rank},
                                                        device, max_unawaited, std::move(ring));
          }),
          py::kw_only(), py::arg("group"), py::arg("peer"), py::arg("peer_rank"), py::arg("device"),
          py::arg("max_unawaited"), py::arg("ring"));
  py::class_<ProcessGroupReceiver, Receiver, std::shared_ptr<ProcessGroupReceiver>>(
      module, "ProcessGroupReceiver")
      .def(
          py::init([](const std::string& group, int peer, int peer_rank, c10::Device device,
                      std::size_t posted_ahead, std::shared_ptr<SharedRing> ring) {
            return std::make_shared<ProcessGroupReceiver>(
                Peer{resolve_group(group), peer, peer_rank}, device, posted_ahead, std::move(ring));
          }),
          py::kw_only(), py::arg("group"), py::arg("peer"), py::arg("peer_rank"), py::arg("device"),
          py::arg("posted_ahead"), py::arg("ring"));
}

}  // namespace pd2
