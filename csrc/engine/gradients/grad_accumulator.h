// The gradients of a batch's microbatches, added up in a flat buffer.
#pragma once

#include "engine/weights/flat_buffer.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
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
// Batches may take turns between several buffers: one batch's gradients are complete and being used
// while the next one's come.
//
// On a device every addition is a launch, and most gradients are small. There they are kept until
// they are many bytes or the backward ends, and then added in one launch (see add_in_groups()).
//
// Hooks sit on the parameters of every weight slot and point to this object, which must outlive
// them; they run on the thread that runs the backward, one backward at a time.
class GradAccumulator {
 public:
  // Elements that a buffer has beyond the packing's: one per parameter, if replicas and copies have
  // to exchange which gradients exist.
  static std::int64_t num_flags(const FlatPacking& packing, bool has_flags) {
    return has_flags ? static_cast<std::int64_t>(packing.views().size()) : 0;
  }
  // Half-precision gradients of many microbatches lose their low bits: added in float32, unless
  // weights and gradients are to be `narrow`.
  static at::ScalarType dtype(at::ScalarType weights,
                              std::optional<at::ScalarType> narrow = std::nullopt);

  // `buffers`: flat, of the packing and dtype(), with the flags.
  GradAccumulator(const FlatPacking& packing, std::vector<std::string> names,
                  std::vector<at::Tensor> buffers);

  // Hooks parameter i of one weight slot.
  void attach(std::size_t parameter, const at::Tensor& slot_parameter);
  // Whether the autograd node is the one through which a hooked parameter gets its gradient.
  static bool takes_from(const torch::autograd::Node& node);

  // From now on gradients are put there instead of being added; null: they are added again.
  void hold(std::vector<HeldGradient>* where) { held_ = where; }
  void add(std::size_t parameter, const at::Tensor& gradient);
  // Gradients of so many bytes are added together, in the order in which they came; those of 16
  // bits as float32, which are no more bytes at a time. 0: each at once, as on the CPU. Elsewhere
  // kGroupBytes to begin with.
  void add_in_groups(std::int64_t bytes) { group_bytes_ = bytes; }
  static constexpr std::int64_t kGroupBytes = std::int64_t{32} << 20;

  const FlatPacking& packing() const { return packing_; }
  // Called with the parameter whenever a gradient has been added.
  void on_added(std::function<void(std::size_t parameter)> then) { on_added_ = std::move(then); }

  // From now on gradients go to this buffer.
  void begin_batch(std::size_t buffer);

  // The buffer to which gradients go, and which parameters have received one there: what adding
  // depends on, and changes.
  std::pair<const void*, std::vector<bool>> state() const {
    const Buffer& buffer = buffers_[current_];
    return {buffer.flat.const_data_ptr(), buffer.has_gradient};
  }
  // As if these had been added by a device that did so by itself, and no others had come.
  void set_added(const std::vector<bool>& has_gradient);

  // The following concern one buffer. They may be called while gradients go to another one.

  // Which parameters have received a gradient since the buffer's begin_batch().
  const std::vector<bool>& has_gradient(std::size_t buffer) const {
    return buffers_[buffer].has_gradient;
  }
  // The sum with other stages' gradients has one if any of them has.
  void set_has_gradient(std::size_t buffer, std::size_t parameter, bool has_gradient) {
    buffers_[buffer].has_gradient[parameter] = has_gradient;
  }
  // Before and after the sum over replicas and copies: a parameter that got no gradient here counts
  // as zero if another one's got one.
  void fill_missing(std::size_t buffer);
  void read_flags(std::size_t buffer);
  at::Tensor flags(std::size_t buffer) const;

  const at::Tensor& flat(std::size_t buffer) const { return buffers_[buffer].flat; }  // with flags
  at::Tensor gradients(std::size_t buffer) const;  // without the flags
  at::Tensor view(std::size_t buffer, std::size_t parameter) const {
    return buffers_[buffer].views[parameter];
  }
  // Moves the sums so far to another buffer, where later gradients will go, too, and has `count`
  // buffers from then on: one more or fewer than before, or as many.
  void move(std::size_t count, std::size_t from, std::size_t to);
  // The most bytes of gradients that were kept at once to be added together, with those in float32
  // of 16-bit ones. From any thread.
  std::int64_t most_kept_bytes() const { return most_kept_bytes_; }

 private:
  class Hook;
  struct Buffer {
    at::Tensor flat;
    std::vector<at::Tensor> views;   // by parameter
    std::vector<bool> has_gradient;  // by parameter
  };
  void append(at::Tensor flat);
  void take(std::size_t parameter, const at::Tensor& variable);
  void keep(std::size_t parameter, const at::Tensor& gradient);
  void add_kept();
  void forget_kept();
  void add_lists(at::TensorList sums, at::TensorList added);

  const FlatPacking& packing_;
  std::vector<std::string> names_;
  std::vector<Buffer> buffers_;
  std::size_t current_ = 0;
  std::vector<HeldGradient>* held_ = nullptr;
  std::function<void(std::size_t parameter)> on_added_;

  struct Kept {
    std::size_t parameter;
    at::Tensor gradient;
  };
  std::int64_t group_bytes_ = 0;
  std::vector<Kept> kept_;
  std::int64_t kept_bytes_ = 0;
  std::atomic<std::int64_t> most_kept_bytes_ = 0;
  bool awaits_end_ = false;  // of the backward, which adds what is kept
};

}  // namespace pd2
