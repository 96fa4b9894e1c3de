// The fused optimizer and its hyper-parameters, as Python sees them.
#include "bindings/bindings.h"
#include "engine/weights/fused_optimizer.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace pd2 {
namespace {

void bind_group_options(py::module_& module) {
  const kernels::SgdOptions sgd;
  const kernels::AdamOptions adam;
  py::class_<GroupOptions>(module, "GroupOptions")
      .def(py::init([](double lr, double weight_decay, bool maximize, double momentum,
                       double dampening, bool nesterov, double beta1, double beta2, double eps,
                       bool amsgrad, bool decoupled_weight_decay) {
             return GroupOptions{.sgd = {.lr = lr,
                                         .momentum = momentum,
                                         .dampening = dampening,
                                         .weight_decay = weight_decay,
                                         .nesterov = nesterov,
                                         .maximize = maximize},
                                 .adam = {.lr = lr,
                                          .beta1 = beta1,
                                          .beta2 = beta2,
                                          .eps = eps,
                                          .weight_decay = weight_decay,
                                          .decoupled_weight_decay = decoupled_weight_decay,
                                          .amsgrad = amsgrad,
                                          .maximize = maximize}};
           }),
           py::kw_only(), py::arg("lr") = sgd.lr, py::arg("weight_decay") = sgd.weight_decay,
           py::arg("maximize") = sgd.maximize, py::arg("momentum") = sgd.momentum,
           py::arg("dampening") = sgd.dampening, py::arg("nesterov") = sgd.nesterov,
           py::arg("beta1") = adam.beta1, py::arg("beta2") = adam.beta2, py::arg("eps") = adam.eps,
           py::arg("amsgrad") = adam.amsgrad,
           py::arg("decoupled_weight_decay") = adam.decoupled_weight_decay)
      .def(
          "with_lr_divided",
          [](GroupOptions self, double divisor) {
            self.sgd.lr /= divisor;
            self.adam.lr /= divisor;
            return self;
          },
          py::arg("divisor"));
}

}  // namespace

void bind_optimizer(py::module_& module) {
  bind_group_options(module);
  py::class_<ParameterSlice>(module, "ParameterSlice")
      .def(py::init([](std::int64_t offset, std::int64_t numel, int group) {
             return ParameterSlice{offset, numel, group};
           }),
           py::kw_only(), py::arg("offset"), py::arg("numel"), py::arg("group"))
      .def_readonly("offset", &ParameterSlice::offset)
      .def_readonly("numel", &ParameterSlice::numel);
  py::class_<FusedOptimizer>(module, "FusedOptimizer")
      .def(py::init([](const std::string& kind, std::vector<ParameterSlice> slices,
                       const at::Tensor& flat_example) {
             return std::make_unique<FusedOptimizer>(parse_optimizer(kind), std::move(slices),
                                                     flat_example);
           }),
           py::arg("kind"), py::arg("slices"), py::arg("flat_example"))
      .def(
          "step",
          [](FusedOptimizer& self, const at::Tensor& w, const at::Tensor& gradient,
             const at::Tensor& w_out, const std::vector<GroupOptions>& groups,
             const std::vector<bool>& has_gradient, const std::optional<at::Tensor>& master) {
            self.step(w, gradient, w_out, groups, has_gradient, master.value_or(at::Tensor()));
          },
          py::kw_only(), py::arg("w"), py::arg("gradient"), py::arg("w_out"), py::arg("groups"),
          py::arg("has_gradient"), py::arg("master") = py::none(),
          py::call_guard<py::gil_scoped_release>());
}

}  // namespace pd2
