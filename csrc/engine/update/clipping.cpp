#include "engine/update/clipping.h"

#include "engine/stage/stage.h"
#include "engine/weights/tensor_norms.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/empty.h>

#include <cmath>

namespace pd2 {
namespace {

at::Tensor on_host(const at::Tensor& numbers) {
  if (!has_streams(numbers.device())) {
    return numbers;
  }
  const at::TensorOptions options(numbers.dtype());
  return at::empty(numbers.sizes(), options.pinned_memory(true)).copy_(numbers);  // waits
}

ParameterNorms gradient_norms(const Stage& stage, const std::vector<std::int64_t>& parameters,
                              const GradientNorm& norm) {
  std::vector<at::Tensor> gradients;
  ParameterNorms norms;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i] >= 0 && stage.masters().leads(i) && stage.gradients().has_gradient(i)) {
      gradients.push_back(stage.gradients().gradient(i));
      norms.parameters.push_back(parameters[i]);
    }
  }
  norms.norms = norms_of(gradients, norm.norm_type());
  if (norm.stays_on_devices()) {
    norms.stream = stream_here(stage.streams().device);
    norms.ready = Fence::of(norms.stream);
  } else {
    norms.norms = on_host(norms.norms);
  }
  return norms;
}

}  // namespace

bool Clipping::apply(Stage& stage, std::int64_t run,
                     const std::function<bool()>& is_stopped) const {
  if (norm) {
    if (gives_norms) {
      norm->give(run, gradient_norms(stage, parameters, *norm), is_stopped);
    }
    const at::Tensor total = norm->wait(run, stream_here(stage.streams().device), is_stopped);
    if (loss_scale && !std::isfinite(total.item<double>())) {
      return false;
    }
    // As Python divides a number by a tensor.
    const at::Tensor coefficient = (total + 1e-6).reciprocal().mul(max_norm).clamp_max(1.0);
    const bool is_one = !norm->stays_on_devices() && coefficient.item<double>() == 1;
    if (!is_one && max_value) {
      stage.scale_gradients(coefficient);  // before their values are clipped
    } else if (!is_one) {
      stage.scale_gradients_in_step(coefficient);
    }
  }
  if (max_value) {
    for (std::size_t i = 0; i < stage.layout().num_parameters(); ++i) {
      if (stage.masters().owns(i) && stage.gradients().has_gradient(i)) {
        stage.gradients().gradient(i).clamp_(-*max_value, *max_value);
      }
    }
  }
  return true;
}

}  // namespace pd2
