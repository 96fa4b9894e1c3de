// Optimizer steps as passes over raw memory: one read of W(t), gradient and state, one write of
// W(t+1) and state. Nothing here knows tensors, parameters or threads.
//
// Common to all functions:
//  - the weights' arrays, `g` and the state arrays have n elements and any alignment their type
//    allows; 64-byte aligned arrays are fastest.
//  - `w_out` may be `w` (in place) or, where both are of one type, `g` (the new weights replace the
//    gradient). Apart from that the arrays must not overlap.
//  - Results are bitwise the same for every instruction set, alignment, and division of an array
//    into calls.
//  - Calls on disjoint arrays may run at the same time.
#pragma once

#include "kernels/host_device.h"

#include <cstdint>

namespace pd2::kernels {

// Hyper-parameters of torch.optim.SGD. `first_step`: the momentum buffer has no content yet and
// becomes the gradient, undampened.
struct SgdOptions {
  double lr = 1e-3;
  double momentum = 0.0;
  double dampening = 0.0;
  double weight_decay = 0.0;
  bool nesterov = false;
  bool maximize = false;
  bool first_step = false;
  bool operator==(const SgdOptions&) const = default;
};

// Hyper-parameters of torch.optim.Adam, and of AdamW with `decoupled_weight_decay`. `step` is the
// number of this step and sets the bias corrections; the first is 1.
struct AdamOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;
  std::int64_t step = 1;
  bool decoupled_weight_decay = false;
  bool amsgrad = false;
  bool maximize = false;
  bool operator==(const AdamOptions&) const = default;
};

// Error feedback for gradients that are a batch late. u is the weights after a step, rounded, minus
// those before it: what rounding left of it. A master w makes plain steps, w(t+1) = w(t) + u, and
// W(t+1), which is rounded for `w_out`, is w(t+1) + coefficient * u. Other weights have no room for
// both: W(t+1) = W(t) + u + coefficient * (u - kept), where `kept` is the step before; it becomes
// u. `first_step`: nothing has been kept, W(t+1) = W(t) + u.
struct FeedbackOptions {
  double coefficient = 1.0;
  bool first_step = false;
  bool operator==(const FeedbackOptions&) const = default;
};

// Where a step reads and writes the weights; `Scalar` is the type of its arithmetic and of state,
// `Gradient` that of gradients.

// T is float or double.
template <typename T>
struct PlainWeights {
  using Scalar = T;
  using Gradient = T;
  using Out = T;
  const T* w;
  T* w_out;
  PD2_HOST_DEVICE PlainWeights at(std::int64_t i) const { return {w + i, w_out + i}; }
};

enum class HalfFormat { kBfloat16, kFloat16 };

// Float32 weights, stepped in place, and `w_out`, the same rounded to nearest even.
template <HalfFormat kFormat>
struct MasterWeights {
  using Scalar = float;
  using Gradient = float;
  using Out = std::uint16_t;
  float* master;
  std::uint16_t* w_out;
  PD2_HOST_DEVICE MasterWeights at(std::int64_t i) const { return {master + i, w_out + i}; }
};

// Float32 weights in two parts (see half.h): a bfloat16 each and what its rounding took off.
struct SplitWeights {
  using Scalar = float;
  using Gradient = float;
  using Out = std::uint16_t;
  const std::uint16_t* w;
  std::int16_t* remainder;
  std::uint16_t* w_out;
  PD2_HOST_DEVICE SplitWeights at(std::int64_t i) const {
    return {w + i, remainder + i, w_out + i};
  }
};

// Either of these with bfloat16 gradients, which the step reads as the float32 that they are.
template <typename Weights>
struct Bfloat16Gradients : Weights {
  using Gradient = std::uint16_t;
  PD2_HOST_DEVICE Bfloat16Gradients at(std::int64_t i) const { return {Weights::at(i)}; }
};

// Weights with a master beside those that are rounded from it.
template <typename Weights>
concept HasMaster = requires(const Weights& weights) {
  weights.master;
};

// `kept`: an array of the type of the step's arithmetic; null where there is a master.
template <typename T>
struct Feedback {
  T* kept;
  FeedbackOptions options;
};
struct NoFeedback {};

// A step's state: SGD's momentum buffer; Adam's exp_avg, exp_avg_sq and max_exp_avg_sq. Arrays that
// the options do not ask for (momentum == 0, no amsgrad) may be null.
template <typename T>
struct State {
  T* arrays[3];
};

}  // namespace pd2::kernels
