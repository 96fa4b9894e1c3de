// A stage's trainable state and the fused optimizers, as Python sees them.
#include "engine/stage/stage.h"

#include "bindings/bindings.h"
#include "engine/fault.h"
#include "engine/weights/device_passes.h"
#include "engine/weights/fused_optimizer.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace pd2 {
namespace {

using StageClass = py::class_<Stage, std::shared_ptr<Stage>>;

template <typename Part, typename AnyStage>
auto& part(AnyStage& stage) {
  if constexpr (std::is_same_v<Part, Slots>) {
    return stage.slots();
  } else if constexpr (std::is_same_v<Part, WeightStore>) {
    return stage.versions();
  } else if constexpr (std::is_same_v<Part, GradientPath>) {
    return stage.gradients();
  } else if constexpr (std::is_same_v<Part, Masters>) {
    return stage.masters();
  } else {
    return stage.step_place();
  }
}

// A method of a part of the stage as one of the stage.
template <typename Part, typename Result, typename... Arguments>
auto of_part(Result (Part::*method)(Arguments...) const) {
  return [method](const Stage& self, Arguments... arguments) {
    return (part<Part>(self).*method)(arguments...);
  };
}
template <typename Part, typename Result, typename... Arguments>
auto of_part(Result (Part::*method)(Arguments...)) {
  return [method](Stage& self, Arguments... arguments) {
    return (part<Part>(self).*method)(arguments...);
  };
}

GradientPathOptions gradient_options(const std::string& replica_group, std::vector<int> sum_order,
                                     std::shared_ptr<CopySum> copy_sum, int copy) {
  GradientPathOptions options;
  if (auto group = resolve_group(replica_group)) {
    options.others = Replicas{std::move(group), std::move(sum_order)};
  } else if (copy_sum) {
    options.others = CopySumEnd{std::move(copy_sum), copy};
  }
  return options;
}

void bind_making(StageClass& stage) {
  stage
      .def(py::init([](const std::vector<at::Tensor>& parameters,
                       const std::vector<std::string>& names, int num_versions,
                       const std::string& replica_group, std::vector<int> sum_order,
                       std::int64_t bucket_bytes, std::shared_ptr<CopySum> copy_sum, int copy,
                       std::vector<at::ScalarType> dtypes, bool split_master,
                       std::optional<at::ScalarType> gradient_dtype,
                       std::shared_ptr<StageStreams> streams, bool steps_on_host) {
             StageOptions options{.num_versions = num_versions,
                                  .precision = {std::move(dtypes), split_master, gradient_dtype},
                                  .gradients = gradient_options(replica_group, std::move(sum_order),
                                                                std::move(copy_sum), copy),
                                  .streams = std::move(streams)};
             options.gradients.bucket_bytes = bucket_bytes;
             options.gradients.to_host = steps_on_host;
             return std::make_shared<Stage>(parameters, names, std::move(options));
           }),
           py::kw_only(), py::arg("parameters"), py::arg("names"), py::arg("num_versions"),
           py::arg("replica_group") = "", py::arg("sum_order") = std::vector<int>(),
           py::arg("bucket_bytes") = 0, py::arg("copy_sum") = py::none(), py::arg("copy") = 0,
           py::arg("dtypes") = std::vector<at::ScalarType>(), py::arg("split_master") = false,
           py::arg("gradient_dtype") = py::none(), py::arg("streams") = py::none(),
           py::arg("steps_on_host") = false)
      .def("attach", &Stage::attach, py::arg("parameter"), py::arg("slot_parameter"))
      .def("tie", of_part(&GradientPath::tie), py::arg("sum"), py::arg("copy"),
           py::arg("parameters"))
      .def(
          "arrange",
          [](Stage& self, bool reads_first, bool waits, const std::shared_ptr<Fault>& fault) {
            self.arrange(reads_first, waits, [&fault] { return fault->raised(); });
          },
          py::arg("reads_first"), py::arg("waits"), py::arg("fault"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "share",
          [](Stage& self, bool shares, const std::vector<bool>& may_cut, bool norms,
             const std::shared_ptr<Fault>& fault) {
            self.step_place().share(shares, may_cut, norms, [&fault] { return fault->raised(); });
          },
          py::arg("shares"), py::arg("may_cut"), py::arg("norms"), py::arg("fault"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "settle",
          [](Stage& self, const std::shared_ptr<Fault>& fault) {
            if (ReplicaSum* replicas = self.gradients().replicas()) {
              replicas->settle([&fault] { return fault->raised(); });
            }
          },
          py::arg("fault"), py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("is_shared", of_part(&GradientPath::is_shared))
      .def("owns", of_part(&Masters::owns), py::arg("parameter"))
      .def("leads", of_part(&Masters::leads), py::arg("parameter"))
      .def(
          "owners",
          [](const Stage& self, std::size_t parameter) {
            std::vector<std::tuple<int, std::int64_t, std::int64_t>> owners;
            for (const auto& [rank, begin, numel] : self.masters().owners(parameter)) {
              owners.emplace_back(rank, begin, numel);
            }
            return owners;
          },
          py::arg("parameter"));
}

void bind_weights(StageClass& stage) {
  stage.def("weight", of_part(&Slots::weight), py::arg("slot"), py::arg("parameter"))
      .def("slot_buffers", of_part(&Slots::flat), py::arg("slot"))
      .def_property_readonly("newest_version", of_part(&WeightStore::newest))
      .def_property_readonly("newest_slot", of_part(&Slots::newest))
      .def_property_readonly("num_versions", of_part(&Slots::num_versions))
      .def_property_readonly("num_slots", of_part(&Slots::num_slots))
      .def_property_readonly("most_live_versions", of_part(&WeightStore::most_live_versions))
      .def("restart_delay", &Stage::restart_delay)
      .def("show",
           [](Stage& self) {
             if (HostMirror* host = self.gradients().host()) {
               host->show();
             }
           })
      .def_property_readonly("frees_gradients", of_part(&GradientPath::frees_buffer))
      .def("load_versions", &Stage::load_versions, py::arg("oldest"), py::arg("newest"))
      .def("slot_of", of_part(&WeightStore::slot), py::arg("version"))
      .def("master", of_part(&Masters::of), py::arg("slot"), py::arg("parameter"))
      .def("hides_master", of_part(&Masters::hides), py::arg("parameter"))
      .def(
          "whole_masters",
          [](Stage& self, const std::shared_ptr<Fault>& fault) {
            return self.masters().hidden([&fault] { return fault->raised(); });
          },
          py::arg("fault"), py::call_guard<py::gil_scoped_release>())
      .def("master_buffers",
           [](const Stage& self) {
             std::vector<at::Tensor> buffers;
             if (!self.gradients().is_shared()) {
               std::ranges::copy_if(self.masters().flats(), std::back_inserter(buffers),
                                    &at::Tensor::defined);
             }
             return buffers;
           })
      .def("set_master", of_part(&Masters::set), py::arg("parameter"), py::arg("value"))
      .def("set_weight", of_part(&Masters::set_weight), py::arg("parameter"), py::arg("value"))
      .def("gradient", of_part(&GradientPath::gradient), py::arg("parameter"))
      .def("has_gradient", of_part(&GradientPath::has_gradient), py::arg("parameter"));
}

void bind_optimizer_state(StageClass& stage) {
  stage
      .def(
          "set_optimizers",
          [](Stage& self, const std::map<std::string, std::vector<int>>& groups_by_kind) {
            std::vector<OptimizerGroups> optimizers;
            for (const auto& [kind, of_parameter] : groups_by_kind) {
              optimizers.push_back({parse_optimizer(kind), of_parameter});
            }
            self.step_place().set_optimizers(optimizers);
          },
          py::arg("groups_by_kind"))
      .def("optimizer_state", of_part(&StepPlace::state), py::arg("name"), py::arg("parameter"))
      .def("set_optimizer_state", of_part(&StepPlace::set_state), py::arg("name"),
           py::arg("parameter"), py::arg("value"))
      .def("step_count", of_part(&StepPlace::step_count), py::arg("parameter"))
      .def("set_step_count", of_part(&StepPlace::set_step_count), py::arg("parameter"),
           py::arg("count"))
      .def("is_fused", of_part(&StepPlace::is_fused), py::arg("parameter"))
      .def("kept_step", of_part(&StepPlace::kept_step), py::arg("parameter"))
      .def(
          "set_kept_step",
          [](Stage& self, std::size_t parameter, const std::optional<at::Tensor>& value) {
            self.step_place().set_kept_step(parameter, value.value_or(at::Tensor()));
          },
          py::arg("parameter"), py::arg("value").none(true));
}

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
                                          .maximize = maximize},
                                 .feedback_coefficient = 0};
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
          py::arg("divisor"))
      .def(
          "with_feedback",
          [](GroupOptions self, double coefficient) {
            self.feedback_coefficient = coefficient;
            return self;
          },
          py::arg("coefficient"));
}

void bind_fused_optimizer(py::module_& module) {
  bind_group_options(module);
  bind_struct(module, "ParameterSlice", std::pair("offset", &ParameterSlice::offset),
              std::pair("numel", &ParameterSlice::numel),
              std::pair("group", &ParameterSlice::group));
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

}  // namespace

void bind_stage(py::module_& module) {
  bind_registration<DevicePasses>(module, "register_device_passes");
  py::class_<StageStreams, std::shared_ptr<StageStreams>>(module, "StageStreams")
      .def(py::init<c10::Device>(), py::arg("device"))
      .def_readonly("device", &StageStreams::device)
      .def_readonly("inputs", &StageStreams::inputs)
      .def(
          "use",
          [](const StageStreams& self, const std::vector<at::Tensor>& tensors) {
            for (const at::Tensor& tensor : tensors) {
              use_on(tensor, self.compute);
            }
          },
          py::arg("tensors"));
  bind_fused_optimizer(module);
  py::class_<CopySum, std::shared_ptr<CopySum>>(module, "CopySum").def(py::init<>());
  py::class_<TiedSum, std::shared_ptr<TiedSum>>(module, "TiedSum")
      .def(py::init([](std::vector<int> processes, const std::string& group) {
             return std::make_shared<TiedSum>(std::move(processes), resolve_group(group));
           }),
           py::arg("processes"), py::arg("group"));
  bind_struct(module, "StageBytes", std::pair("weights", &StageBytes::weights),
              std::pair("masters", &StageBytes::masters),
              std::pair("gradients", &StageBytes::gradients),
              std::pair("optimizer_state", &StageBytes::optimizer_state),
              std::pair("padding", &StageBytes::padding),
              std::pair("kept_gradients", &StageBytes::kept_gradients),
              std::pair("replica_sums", &StageBytes::replica_sums),
              std::pair("host_copies", &StageBytes::host_copies),
              std::pair("on_host", &StageBytes::on_host));
  StageClass stage(module, "Stage");
  bind_making(stage);
  bind_weights(stage);
  bind_optimizer_state(stage);
  stage.def("bytes", &Stage::bytes);
  module.def(
      "use_here",
      [](const std::vector<at::Tensor>& tensors) {
        for (const at::Tensor& tensor : tensors) {
          use_on(tensor, stream_here(tensor.device()));
        }
      },
      py::arg("tensors"));
}

}  // namespace pd2
