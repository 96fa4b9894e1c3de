// One optimizer step over a stage's flat buffers: W(t) in, W(t+1) out.
#pragma once

#include "engine/weights/device_passes.h"
#include "engine/weights/flat_buffer.h"
#include "kernels/grid/launch.h"
#include "kernels/optimizer.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace pd2 {

// AdamW is kAdam with decoupled weight decay.
using OptimizerKind = kernels::StepRule;

// Throws ValueError unless it is "sgd" or "adam".
OptimizerKind parse_optimizer(std::string_view kind);

// Hyper-parameters of one param_group. The optimizer fills in `sgd.first_step` and `adam.step`.
// `feedback_coefficient`: steps are fed back by it (kernels::FeedbackOptions); 0: they are not, and
// what was kept is forgotten.
struct GroupOptions {
  kernels::SgdOptions sgd;
  kernels::AdamOptions adam;
  double feedback_coefficient = 0;
};

// A parameter's place in the flat buffer, in elements. Offsets are multiples of
// alignment_bytes(); the padding up to the next offset is zero in every buffer, and stays so.
struct ParameterSlice {
  std::int64_t offset = 0;
  std::int64_t numel = 0;
  int group = 0;
};

// Owns the flat state buffers of its parameters of one stage and dtype (packed as the
// weights are but without what lies between the slices, allocated at first use) and each
// parameter's step count. Not thread-safe: one thread, the stage's, calls it. The arithmetic is
// that of torch.optim.SGD, Adam and AdamW with foreach=False.
class FusedOptimizer {
 public:
  // `flat_example` gives length, dtype and device of gradients; its content is not read. State is
  // of that dtype too; of bfloat16 gradients, which bfloat16 weights with a master may have, it is
  // float32. Slices are in ascending order. Throws ValueError for slices that overlap, are not on a
  // 64-byte boundary or leave the buffer, for other dtypes and where the device has no passes.
  FusedOptimizer(OptimizerKind kind, std::vector<ParameterSlice> slices,
                 const at::Tensor& flat_example);

  // Writes every slice of `w_out`: parameters with a gradient are stepped, the others copied bit
  // for bit, their state and step count untouched (as stock optimizers skip grad None). Elements
  // outside all slices are neither read nor written, apart from padding. `w_out` may be `w` or
  // `gradient`; the flat buffers may be longer than `flat_example` was. On a device the work is
  // enqueued on its current stream: one launch. Throws ValueError, before anything is written, if a
  // tensor or list does not fit the slices.
  //
  // `master`: the float32 weights of which `w` and `w_out` (bfloat16, float16) are roundings, or
  // with feedback were before its correction, stepped in place; or int16, what the roundings to
  // bfloat16 took off (kernels/half.h). Undefined: the weights themselves are stepped.
  //
  // `factor`: one number of float32 or float64, on the host or the device, by which the gradients
  // are multiplied first, to the bits of mul_(); what they are afterwards is not said.
  // Undefined: 1.
  void step(const at::Tensor& w, const at::Tensor& gradient, const at::Tensor& w_out,
            std::span<const GroupOptions> groups, const std::vector<bool>& has_gradient,
            const at::Tensor& master = {}, const at::Tensor& factor = {});

  // State by the name that torch.optim gives it: "momentum_buffer" (SGD), "exp_avg", "exp_avg_sq",
  // "max_exp_avg_sq" (Adam). The flat tensor itself, not a copy; undefined where there is none yet.
  // Throws ValueError for any other name.
  at::Tensor state(std::string_view name) const;
  // Where parameter i's part of every state buffer begins, in elements.
  std::int64_t state_offset(std::size_t i) const { return state_offsets_.at(i); }
  // As state(); makes it, of zeros, if there is none yet.
  at::Tensor state_or_zeros(std::string_view name);

  // Steps that parameter i has taken. SGD counts them too; 0 means that it has no momentum yet.
  std::int64_t step_count(std::size_t i) const;
  void set_step_count(std::size_t i, std::int64_t count);
  // Parameter i's part of a state has been written from outside: it counts as a step's.
  void mark_loaded(std::size_t i) { has_momentum_.at(i) = true; }

  // The flat tensor of the steps that feedback keeps, packed as states are; undefined before the
  // first, and with float32 masters. A parameter's part means something while has_kept() is true.
  at::Tensor kept() const { return kept_; }
  at::Tensor kept_or_zeros();
  bool has_kept(std::size_t i) const { return has_kept_.at(i); }
  void set_has_kept(std::size_t i, bool has_kept) { has_kept_.at(i) = has_kept; }

  // Of state, and of what feedback keeps.
  PaddedBytes state_bytes() const;

 private:
  void check_arguments(const at::Tensor& w, const at::Tensor& gradient, const at::Tensor& w_out,
                       std::span<const GroupOptions> groups, const std::vector<bool>& has_gradient,
                       const at::Tensor& master) const;
  void allocate_state(std::span<const GroupOptions> groups, const std::vector<bool>& has_gradient,
                      bool keeps_steps);
  std::vector<kernels::StepOfRun> runs(std::span<const GroupOptions> groups,
                                       const std::vector<bool>& has_gradient) const;

  struct State {
    std::string_view name;
    at::Tensor flat;
  };
  const State& find_state(std::string_view name) const;
  at::Tensor state_or_zeros(std::size_t which);

  OptimizerKind kind_;
  std::vector<ParameterSlice> slices_;
  std::int64_t numel_;
  std::vector<std::int64_t> state_offsets_;
  std::int64_t state_numel_ = 0;
  at::ScalarType gradient_dtype_;
  at::TensorOptions options_;  // of the arithmetic
  const DevicePasses* passes_;
  std::vector<State> states_;
  std::vector<std::int64_t> step_counts_;
  std::vector<bool> has_momentum_;
  at::Tensor kept_;
  std::vector<bool> has_kept_;
  at::Tensor table_;  // of the passes
};

}  // namespace pd2
