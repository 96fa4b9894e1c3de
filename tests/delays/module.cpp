// The extension module of the delays, which tests and benchmarks alone build
// (benchmarks/measuring/_delays.pyi). It shares pipedream2bw._C's types of channels.
#include "bindings/bindings.h"
#include "delays/delayed_backend.h"
#include "delays/delayed_sender.h"

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>
#include <utility>

namespace pd2 {
namespace {

void bind_delays(py::module_& module) {
  py::class_<DelayedSender, Sender, std::shared_ptr<DelayedSender>>(module, "DelayedSender")
      .def(py::init([](std::shared_ptr<Sender> sender, double shortest, double longest,
                       std::uint64_t seed) {
             return std::shared_ptr<DelayedSender>(
                 new DelayedSender(std::move(sender), DelayedSender::Seconds(shortest),
                                   DelayedSender::Seconds(longest), seed),
                 delete_without_gil<DelayedSender>);
           }),
           py::kw_only(), py::arg("sender").none(false), py::arg("shortest"), py::arg("longest"),
           py::arg("seed"));
  // For torch.distributed's register_backend().
  module.def(
      "delayed_backend",
      [](c10::intrusive_ptr<c10d::Backend> backend, double shortest, double longest,
         std::uint64_t seed) -> c10::intrusive_ptr<c10d::Backend> {
        return c10::make_intrusive<DelayedBackend>(std::move(backend),
                                                   DelayedBackend::Seconds(shortest),
                                                   DelayedBackend::Seconds(longest), seed);
      },
      py::kw_only(), py::arg("backend"), py::arg("shortest"), py::arg("longest"), py::arg("seed"));
}

}  // namespace
}  // namespace pd2

PYBIND11_MODULE(_delays, module) {
  py::module_::import("pipedream2bw._C");  // binds Sender
  pd2::bind_delays(module);
}
