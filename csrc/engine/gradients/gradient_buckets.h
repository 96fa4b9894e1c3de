// When the gradients of a batch are complete, bucket by bucket.
#pragma once

#include "engine/gradients/grad_accumulator.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace pd2 {

// Cuts the gradients into buckets, from the last parameter to the first, which is about the order
// in which a backward gives them. A bucket begins when the batch's last microbatch has given all of
// its gradients, and those before it have begun (Li et al., arXiv 2006.15704, section 3.2.3).
//
// Used by the stage's executor thread, and by the thread that runs its backward.
class GradientBuckets {
 public:
  struct Bucket {
    std::size_t dtype;
    std::size_t first, last;  // parameters
    std::int64_t begin, end;  // elements
    bool is_early;            // false: begins at the batch's end, whatever comes
  };
  // With one bucket of a dtype there is nothing to gain: it begins at the end. So do flags, with it
  // or after the others.
  static std::vector<Bucket> cut(const std::vector<std::unique_ptr<GradAccumulator>>& gradients,
                                 std::int64_t bucket_bytes);

  // What a bucket of this number begins with its gradients, which are in that buffer. False: it
  // cannot yet.
  using Begin = std::function<bool(std::size_t bucket, std::size_t buffer)>;

  // `gradients`: one for each dtype; they outlive this object, and tell it alone what comes.
  GradientBuckets(const std::vector<std::unique_ptr<GradAccumulator>>& gradients,
                  std::int64_t bucket_bytes, Begin begin);
  GradientBuckets(const GradientBuckets&) = delete;
  GradientBuckets& operator=(const GradientBuckets&) = delete;

  const std::vector<Bucket>& buckets() const { return buckets_; }

  // Announces gradients of the batch's next microbatch, which will go to this buffer.
  void begin_microbatch(std::size_t buffer, bool is_last);
  bool is_last_microbatch() const { return is_last_; }
  // Those of this microbatch that have come count for nothing: its backward will be run again.
  void forget_microbatch();
  // Whether any begins in a backward.
  bool has_early() const { return !times_.empty(); }
  // Begins those that have not begun.
  void begin_rest(std::size_t buffer);
  // The next gradients are another batch's.
  void end_batch();

 private:
  // How often one parameter's gradient came: more than once in a microbatch if a part of it was
  // recomputed by another backward.
  struct Times {
    std::int64_t in_this_microbatch = 0, at_most = 0;
  };
  void came(std::size_t dtype, std::size_t parameter);
  bool is_complete(const Bucket& bucket) const;

  const Begin begin_;
  const std::vector<Bucket> buckets_;
  std::vector<std::vector<Times>> times_;  // by dtype and parameter; none without early buckets
  std::size_t num_begun_ = 0;
  bool is_last_ = false;
  std::size_t buffer_ = 0;
};

}  // namespace pd2
