#include "engine/update/clipping.h"

#include "engine/stage/stage.h"
#include "engine/weights/tensor_norms.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/clamp.h>

#include <cmath>

namespace pd2 {
namespace {

ParameterNorms gradient_norms(const Stage& stage, const std::vector<std::int64_t>& parameters,
                              double norm_type) {
  std::vector<at::Tensor> gradients;
  ParameterNorms norms;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i] >= 0 && stage.leads(i) && stage.has_gradient(i)) {
      gradients.push_back(stage.gradient(i));
      norms.emplace_back(parameters[i], 0.0);
    }
  }
  const std::vector<double> values = norms_of(gradients, norm_type);
  for (std::size_t i = 0; i < values.size(); ++i) {
    norms[i].second = values[i];
  }
  return norms;
}

}  // namespace

bool Clipping::apply(Stage& stage, std::int64_t run,
                     const std::function<bool()>& is_stopped) const {
  if (norm) {
    if (gives_norms) {
      norm->give(run, gradient_norms(stage, parameters, norm->norm_type()), is_stopped);
    }
    const at::Tensor total = norm->wait(run, is_stopped);
    if (loss_scale && !std::isfinite(total.item<double>())) {
      return false;
    }
    // As Python divides a number by a tensor.
    const at::Tensor coefficient = (total + 1e-6).reciprocal().mul(max_norm).clamp_max(1.0);
    const auto factor = coefficient.item<double>();
    if (factor != 1 && max_value) {
      stage.scale_gradients(factor);  // before their values are clipped
    } else if (factor != 1) {
      stage.scale_gradients_in_step(factor);
    }
  }
  if (max_value) {
    for (std::size_t i = 0; i < stage.num_parameters(); ++i) {
      if (stage.owns(i) && stage.has_gradient(i)) {
        stage.gradient(i).clamp_(-*max_value, *max_value);
      }
    }
  }
  return true;
}

}  // namespace pd2
