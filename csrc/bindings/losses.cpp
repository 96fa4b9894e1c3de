// Losses, norms of gradients, and the failure that ends waiting for them, as Python sees them.
#include "bindings/bindings.h"
#include "bindings/groups.h"
#include "bindings/interruptible_wait.h"
#include "engine/fault.h"
#include "engine/loss/loss_board.h"
#include "engine/update/gradient_norm.h"
#include "transport/shared_board.h"

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace pd2 {

void bind_losses(py::module_& module) {
  py::class_<Fault, std::shared_ptr<Fault>>(module, "Fault")
      .def(py::init<>())
      .def("raise_", &Fault::raise, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("cause", [](const Fault& self) -> py::object {
        return self.raised() ? py::cast(self.cause()) : py::none();
      });
  py::class_<LossSlot, std::shared_ptr<LossSlot>>(module, "LossSlot");
  py::class_<LossBoard, std::shared_ptr<LossBoard>>(module, "LossBoard")
      .def(py::init([](std::shared_ptr<Fault> fault, const std::string& group,
                       std::shared_ptr<SharedBoard> shared, const std::vector<int>& ranks,
                       int replica, int num_replicas, int num_pipelines, int num_numbers) {
             return std::make_shared<LossBoard>(std::move(fault), resolve_group(group),
                                                std::move(shared), ranks, replica, num_replicas,
                                                num_pipelines, num_numbers);
           }),
           py::arg("fault"), py::arg("group"), py::arg("shared"), py::arg("ranks"),
           py::arg("replica"), py::arg("num_replicas"), py::arg("num_pipelines"),
           py::arg("num_numbers"))
      .def("expect", &LossBoard::expect, py::arg("batch"))
      .def("done", [](const LossBoard& self, const LossSlot& slot) { return self.done(slot); })
      .def("wait",
           [](const LossBoard& self, const LossSlot& slot) {
             wait_interruptibly([&](auto timeout) { return self.wait_for(slot, timeout); });
             return slot.numbers;  // what is there no longer changes
           })
      .def(
          "finish",
          [](LossBoard& self, double timeout) {
            const auto deadline =
                std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout);
            wait_interruptibly([&](auto slice) {
              return self.finish_for(slice) || std::chrono::steady_clock::now() > deadline;
            });
          },
          py::arg("timeout"))
      .def("close", &LossBoard::close, py::call_guard<py::gil_scoped_release>());
}

void bind_norm(py::module_& module) {
  py::class_<LossScale, std::shared_ptr<LossScale>>(module, "LossScale")
      .def(py::init([](double init_scale, double growth_factor, double backoff_factor,
                       std::int64_t growth_interval, std::int64_t version) {
             return std::make_shared<LossScale>(
                 LossScaleOptions{init_scale, growth_factor, backoff_factor, growth_interval},
                 version);
           }),
           py::arg("init_scale"), py::arg("growth_factor"), py::arg("backoff_factor"),
           py::arg("growth_interval"), py::arg("version"))
      .def("of_version", &LossScale::of_version, py::arg("version"))
      .def_property_readonly("growth_tracker", &LossScale::growth_tracker)
      .def("set", &LossScale::set, py::arg("version"), py::arg("scale"), py::arg("growth_tracker"));
  py::class_<NormSlot, std::shared_ptr<NormSlot>>(module, "NormSlot");
  py::class_<GradientNorm, std::shared_ptr<GradientNorm>>(module, "GradientNorm")
      .def(py::init([](std::shared_ptr<Fault> fault, std::int64_t num_parameters, int num_stages,
                       int num_readers, double norm_type, bool is_double, const std::string& group,
                       std::shared_ptr<SharedBoard> shared, std::shared_ptr<LossScale> loss_scale) {
             return std::make_shared<GradientNorm>(
                 std::move(fault), num_parameters, num_stages, num_readers, norm_type,
                 is_double ? at::kDouble : at::kFloat, resolve_group(group), std::move(shared),
                 std::move(loss_scale));
           }),
           py::arg("fault"), py::arg("num_parameters"), py::arg("num_stages"),
           py::arg("num_readers"), py::arg("norm_type"), py::arg("is_double"), py::arg("group"),
           py::arg("shared").none(true), py::arg("loss_scale").none(true))
      .def("expect", &GradientNorm::expect, py::arg("batch"))
      .def("done", [](const GradientNorm& self, const NormSlot& slot) { return self.done(slot); })
      .def("wait", [](const GradientNorm& self, const NormSlot& slot) {
        wait_interruptibly([&](auto timeout) { return self.wait_for(slot, timeout); });
        return *slot.value;  // what is there no longer changes
      });
}

}  // namespace pd2
