// Clips the gradients of a batch before the step.
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

// The clipping of one stage's gradients, with the arithmetic of torch.nn.utils.clip_grad_norm_ and
// clip_grad_value_.
struct Clipping {
  std::shared_ptr<GradientNorm> norm;  // null: gradients are clipped by value
  double max_norm = std::numeric_limits<double>::infinity();
  // By the stage's parameter: its number in the model; -1: another stage holds it too and gives its
  // norm.
  std::vector<std::int64_t> parameters;
  bool gives_norms = true;  // false: a copy of the stage does
  std::optional<double> max_value;
  // Null: losses are not scaled. Needs the norm, which is not finite if a gradient is not.
  std::shared_ptr<LossScale> loss_scale;

  // Clips the gradients of the batch whose last run `run` is. Returns false if a gradient of the
  // scaled loss overflowed, on any stage: there is no step then.
  bool apply(Stage& stage, std::int64_t run, const std::function<bool()>& is_stopped) const;
};

}  // namespace pd2
