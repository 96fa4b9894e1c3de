// The sum of a stage's gradients over its replicas.
#pragma once

#include "engine/gradients/grad_accumulator.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace pd2 {

// Cuts the gradients into buckets, from the last parameter to the first, which is about the order
// in which a backward gives them. The sum of a bucket begins when the batch's last microbatch has
// given all of its gradients, and those before it have begun, so that all replicas begin them in
// one order (Li et al., arXiv 2006.15704, section 3.2.3). With one bucket there is nothing to gain
// and it is summed with the flags, at the end.
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
  void begin_microbatch(std::size_t buffer, bool is_last);
  // All gradients of the batch are in this buffer: begins the sums that have not begun.
  UnderWay end_batch(std::size_t buffer);
  // If a batch is complete but for end_batch(): waits for its sum, after which it may be moved.
  // Every replica calls it. Throws ChannelAborted when stopped.
  void settle(const std::function<bool()>& is_stopped);

  double timeout() const { return timeout_; }  // of the group, in seconds
  void drop_connections() { group_.reset(); }

 private:
  struct Bucket {
    std::size_t dtype;
    std::size_t first, last;  // parameters
    std::int64_t begin, end;  // elements, the flags' too where they are summed with it
    bool is_early;
  };
  // How often one parameter's gradient came: more than once in a microbatch if a part of it was
  // recomputed by another backward.
  struct Times {
    std::int64_t in_this_microbatch = 0, at_most = 0;
  };
  void add_buckets(std::size_t dtype, std::int64_t bucket_bytes);
  void came(std::size_t dtype, std::size_t parameter);
  bool is_complete(const Bucket& bucket) const;
  void finish(UnderWay& sum, std::size_t buffer) const;
  c10::intrusive_ptr<c10d::Work> begin(const Bucket& bucket, std::size_t buffer) const;

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const double timeout_;
  const std::vector<std::unique_ptr<GradAccumulator>>& gradients_;
  std::vector<Bucket> buckets_;
  std::vector<std::vector<Times>> times_;  // by dtype and parameter; none without early buckets
  bool is_last_ = false;
  std::size_t buffer_ = 0;
  UnderWay under_way_;
};

}  // namespace pd2
