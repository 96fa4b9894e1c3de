// The sum of a stage's gradients over its replicas.
#pragma once

#include "engine/gradients/grad_accumulator.h"
#include "engine/gradients/gradient_buckets.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace pd2 {

// Sums bucket by bucket (see GradientBuckets), so that all replicas begin them in one order.
//
// Used by the stage's executor thread alone: sums of two batches must not begin in two orders.
class ReplicaSum {
 public:
  // The sum of one batch.
  struct UnderWay {
    std::vector<c10::intrusive_ptr<c10d::Work>> works;  // of the first buckets
    bool is_settled = false;                            // nothing to wait for or to read
  };

  // `gradients`: one for each dtype, with flags; they outlive this object.
  ReplicaSum(c10::intrusive_ptr<c10d::ProcessGroup> group, std::int64_t bucket_bytes,
             const std::vector<std::unique_ptr<GradAccumulator>>& gradients);

  // Announces gradients of the batch's next microbatch, which will go to this buffer.
  void begin_microbatch(std::size_t buffer, bool is_last) {
    buffer_ = buffer;
    buckets_.begin_microbatch(buffer, is_last);
  }
  // Those of UnderWay::works.
  const std::vector<GradientBuckets::Bucket>& buckets() const { return buckets_.buckets(); }
  // All gradients of the batch are in this buffer: begins the sums that have not begun.
  UnderWay end_batch(std::size_t buffer);
  // If a batch is complete but for end_batch(): waits for its sum, after which it may be moved.
  // Every replica calls it. Throws ChannelAborted when stopped.
  void settle(const std::function<bool()>& is_stopped);

  double timeout() const { return timeout_; }  // of the group, in seconds
  void drop_connections() { group_.reset(); }

 private:
  void finish(std::size_t buffer);
  c10::intrusive_ptr<c10d::Work> begin(std::size_t bucket, std::size_t buffer) const;

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const double timeout_;
  const std::vector<std::unique_ptr<GradAccumulator>>& gradients_;
  GradientBuckets buckets_;
  std::size_t buffer_ = 0;
  UnderWay under_way_;
};

}  // namespace pd2
