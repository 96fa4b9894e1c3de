#include "engine/update/clipping.h"

#include "engine/stage/stage.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/linalg_vector_norm.h>

#include <cmath>

namespace pd2 {
namespace {

ParameterNorms norms_of(const Stage& stage, const std::vector<std::int64_t>& parameters,
                        double norm_type) {
  ParameterNorms norms;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i] >= 0 && stage.has_gradient(i)) {
      norms.emplace_back(parameters[i], at::linalg_vector_norm(stage.gradient(i), norm_type));
    }
  }
  return norms;
}

}  // namespace

bool Clipping::apply(Stage& stage, std::int64_t run,
                     const std::function<bool()>& is_stopped) const {
  if (norm) {
    if (gives_norms) {
      norm->give(run, norms_of(stage, parameters, norm->norm_type()), is_stopped);
    }
    const at::Tensor total = norm->wait(run, is_stopped);
    if (loss_scale && !std::isfinite(total.item<double>())) {
      return false;
    }
    // As Python divides a number by a tensor.
    const at::Tensor coefficient = (total + 1e-6).reciprocal().mul(max_norm).clamp_max(1.0);
    if (coefficient.item<double>() != 1) {
      stage.scale_gradients(coefficient);
    }
  }
  if (max_value) {
    for (std::size_t i = 0; i < stage.num_parameters(); ++i) {
      if (stage.has_gradient(i)) {
        stage.gradient(i).clamp_(-*max_value, *max_value);
      }
    }
  }
  return true;
}

}  // namespace pd2
