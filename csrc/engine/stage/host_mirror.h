// What a stage has in the host's memory, if its optimizer works there.
#pragma once

#include "engine/gradients/gradient_buckets.h"
#include "engine/streams.h"
#include "engine/weights/flat_buffer.h"

#include <ATen/core/Tensor.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace pd2 {

// The newest weights, and the gradients of the batch whose update is made: a fused optimizer steps
// the weights here in place, while the device's versions are read.
//
//   device, compute   B  B  B(last)    F  F  B ...                 F of the version made
//   device, down            g2 g1 g0
//   host                       step 2  step 1  step 0
//   device, up                         w2      w1      w0
//
// What a bucket's gradients, step and weights wait for is that bucket's alone. The memory that
// copies go through is page-locked; masters and moments, which never leave the host, lie on huge
// pages. On the CPU a copy is done when the call returns.
//
// fetch() and fetch_rest() are called by whoever may touch the device's gradients; what concerns a
// step, by the thread that makes the update.
class HostMirror {
 public:
  // Parameters that are neighbours, whose gradients come and whose weights go in one copy.
  struct Bucket {
    std::size_t dtype;
    std::size_t first, last;  // parameters
    std::int64_t begin, end;  // elements
    bool is_fetched = false;  // the copy of its gradients has been submitted
    Fence fetched{};          // they are there
    Fence sent{};             // its weights have been read
  };

  // `gradients`, the device's: one for each dtype; they outlive this object. `fetches_early`: a
  // bucket's gradients are fetched as soon as the batch's last microbatch has given them.
  HostMirror(const StageStreams& streams,
             const std::vector<std::unique_ptr<GradAccumulator>>& gradients,
             std::int64_t bucket_bytes, bool fetches_early);

  const std::vector<Bucket>& buckets() const { return buckets_; }
  // Flat, without flags.
  const at::Tensor& weights(std::size_t dtype) const { return parts_.at(dtype).weights; }
  at::Tensor weight(std::size_t dtype, std::size_t index) const;

  // Gradients of a microbatch are about to come; see GradientBuckets.
  void begin_microbatch(std::size_t buffer, bool is_last);
  void forget_microbatch();
  // Whether anything is fetched in a backward.
  bool fetches_early() const { return early_ && early_->has_early(); }
  // The batch's gradients are complete, and are being summed if `sums`: no gradients of the next
  // one are fetched until end_update().
  void begin_update(bool sums);
  // After what the current stream was given: copies the gradients of these parameters, or all that
  // have not been copied, from a buffer of the device's.
  void fetch(const GradientBuckets::Bucket& bucket, std::size_t buffer);
  void fetch_rest(std::size_t buffer);
  // No gradients are fetched any more: the device's buffer may be used again.
  void release();
  // Whether it may be, after some time at most; `compute` is held back until it is.
  bool wait_until_released(std::chrono::milliseconds at_most, const MaybeStream& compute);

  // Of the batch that is being updated; the host waits until it is there.
  at::Tensor gradient(std::size_t dtype, std::size_t index) const;
  const at::Tensor& gradients(std::size_t dtype) const { return parts_.at(dtype).gradients; }
  std::vector<bool>& has_gradient(std::size_t dtype) { return parts_.at(dtype).has_gradient; }

  // A bucket's gradients have come, and its weights may be written.
  void await(std::size_t bucket) const;
  // Copies its weights to a slot; `begin_sending` before the first, `end_sending` after the last:
  // the current stream's work is before and after these copies.
  void begin_sending() const;
  void send(std::size_t bucket, const at::Tensor& slot);
  void end_sending() const;
  // Also where there was no step.
  void end_update();
  // Fetched gradients are no longer wanted.
  void forget();

  // The slot of the newest weights was written together with its masters.
  void take_weights(std::size_t dtype, const at::Tensor& slot);
  // The user may write to the newest weights.
  void show() { is_shown_ = true; }
  // If they have been shown: takes over what was written. To masters only where the weight is not
  // what it was, or they would lose their low bits.
  void take_changes(const std::vector<at::Tensor>& slot, const std::vector<at::Tensor>& masters);

  // Of weights and gradients.
  PaddedBytes bytes() const;

 private:
  struct Part {
    const FlatPacking& packing;
    at::Tensor weights, gradients;  // flat
    std::vector<bool> has_gradient{};
    std::vector<std::size_t> bucket_of{};  // by parameter
  };
  at::Tensor allocate(std::int64_t numel, at::ScalarType dtype) const;
  void fetch(Bucket& bucket, std::size_t buffer);

  const c10::Device device_;
  const MaybeStream down_, up_;
  const std::vector<std::unique_ptr<GradAccumulator>>& of_device_;
  std::vector<Part> parts_;  // by dtype
  std::vector<Bucket> buckets_;
  std::unique_ptr<GradientBuckets> early_;  // null: nothing is fetched before all is summed
  std::atomic<bool> is_stepping_ = false, is_shown_ = false;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_released_ = true;
  Fence released_;
};

}  // namespace pd2
