// Loss scales, norms of gradients and clipping, as Python sees them.
#include "engine/update/clipping.h"

#include "bindings/bindings.h"

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

namespace pd2 {
namespace {

void bind_loss_scale(py::module_& module) {
  py::class_<LossScale, std::shared_ptr<LossScale>>(module, "LossScale")
      .def(py::init([](double init_scale, double growth_factor, double backoff_factor,
                       std::int64_t growth_interval, std::int64_t version) {
             return std::make_shared<LossScale>(
                 LossScaleOptions{init_scale, growth_factor, backoff_factor, growth_interval},
                 version);
           }),
           py::kw_only(), py::arg("init_scale"), py::arg("growth_factor"),
           py::arg("backoff_factor"), py::arg("growth_interval"), py::arg("version"))
      .def("of_version", &LossScale::of_version, py::arg("version"))
      .def_property_readonly("growth_tracker", &LossScale::growth_tracker)
      .def("set", &LossScale::set, py::arg("version"), py::arg("scale"), py::arg("growth_tracker"));
}

void bind_norm(py::module_& module) {
  py::class_<GradientNorm, std::shared_ptr<GradientNorm>>(module, "GradientNorm")
      .def(py::init([](std::shared_ptr<Fault> fault, std::int64_t num_parameters, int num_stages,
                       int num_readers, double norm_type, bool is_double, bool stays_on_devices,
                       const std::string& group, std::shared_ptr<SharedBoard> shared,
                       std::shared_ptr<LossScale> loss_scale) {
             GradientNormOptions options{num_parameters,
                                         num_stages,
                                         num_readers,
                                         norm_type,
                                         is_double ? at::kDouble : at::kFloat,
                                         stays_on_devices,
                                         std::move(loss_scale)};
             return std::make_shared<GradientNorm>(std::move(options), std::move(fault),
                                                   resolve_group(group), std::move(shared));
           }),
           py::kw_only(), py::arg("fault"), py::arg("num_parameters"), py::arg("num_stages"),
           py::arg("num_readers"), py::arg("norm_type"), py::arg("is_double"),
           py::arg("stays_on_devices"), py::arg("group"), py::arg("shared").none(true),
           py::arg("loss_scale").none(true))
      .def("expect", &GradientNorm::expect, py::arg("run"));
}

}  // namespace

void bind_clipping(py::module_& module) {
  bind_loss_scale(module);
  bind_norm(module);
  bind_struct(
      module, "Clipping", std::pair("norm", &Clipping::norm),
      std::pair("max_norm", &Clipping::max_norm), std::pair("parameters", &Clipping::parameters),
      std::pair("gives_norms", &Clipping::gives_norms),
      std::pair("max_value", &Clipping::max_value), std::pair("loss_scale", &Clipping::loss_scale));
}

}  // namespace pd2
