// What is done to a batch's gradients before the step, so that none of them is too large.
#pragma once

#include "engine/update/gradient_norm.h"
#include "engine/update/loss_scale.h"

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

namespace pd2 {

class Stage;

// Of one stage. The arithmetic is that of torch.nn.utils.clip_grad_norm_ and clip_grad_value_.
struct Clipping {
  std::shared_ptr<GradientNorm> norm;  // null: gradients are clipped by value
  double max_norm = std::numeric_limits<double>::infinity();
  // Their numbers in the model, -1: another stage holds it too and gives its norm.
  std::vector<std::int64_t> parameters;
  bool gives_norms = true;  // not if a copy of the stage does
  std::optional<double> max_value;
  // Needs the norm, which is not finite where a gradient is not.
  std::shared_ptr<LossScale> loss_scale;

  // False: a gradient of the scaled loss overflowed, on this stage or another one; there is no
  // step.
  bool apply(Stage& stage, std::int64_t batch, const std::function<bool()>& is_stopped) const;
};

}  // namespace pd2
