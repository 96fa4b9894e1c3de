// The gradients of a batch's microbatches, added up in one flat buffer.
#pragma once

#include "engine/flat_buffer.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace pd2 {

class GradAccumulator;

// A gradient that is to be added later.
struct HeldGradient {
  GradAccumulator* accumulator = nullptr;
  std::size_t parameter = 0;
  at::Tensor gradient;
};

// Takes every gradient out of autograd by a post-accumulate hook as soon as it exists: the batch's
// first microbatch writes it into the flat buffer, the later ones add, so the buffer is never
// zero-filled and no `.grad` outlives the hook. Microbatches add up in the order of their
// backwards, which is the order in which stock gradient accumulation adds them.
//
// Hooks sit on the parameters of every weight slot and point to this object, which must outlive
// them; they run on the thread that runs the backward, one backward at a time.
class GradAccumulator {
 public:
  // `flags` appends one element per parameter, for replicas and copies to tell which gradients
  // exist.
  GradAccumulator(const FlatLayout& layout, std::vector<std::string> names, bool flags);

  // Hooks parameter i of one weight slot.
  void attach(std::size_t parameter, const at::Tensor& slot_parameter);
  // Whether the autograd node is the one through which a hooked parameter gets its gradient.
  static bool takes_from(const torch::autograd::Node& node);

  // From now on gradients are put there in place of being added; null: no longer.
  void hold(std::vector<HeldGradient>* where) { held_ = where; }
  void add(std::size_t parameter, const at::Tensor& gradient);

  void begin_batch();
  // Which parameters received a gradient since begin_batch().
  const std::vector<bool>& has_gradient() const { return has_gradient_; }

  // Before and after the sum over replicas and copies: a parameter that got no gradient here counts
  // as zero if another one's got one.
  void fill_missing();
  void read_flags();

  const at::Tensor& flat() const { return flat_; }  // gradients, then the flags
  at::Tensor gradients() const;                     // without the flags
  at::Tensor view(std::size_t parameter) const { return views_[parameter]; }

 private:
  class Hook;
  void take(std::size_t parameter, const at::Tensor& variable);

  const FlatLayout& layout_;
  std::vector<std::string> names_;
  at::Tensor flat_;
  bool flags_;
  std::vector<at::Tensor> views_;
  std::vector<bool> has_gradient_;
  std::vector<HeldGradient>* held_ = nullptr;
};

}  // namespace pd2
