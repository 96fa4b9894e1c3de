#include "engine/gradients/replica_sum.h"

#include "core/check.h"
#include "engine/channels/wait_for_work.h"
#include "engine/streams.h"

#include <utility>

namespace pd2 {

ReplicaSum::ReplicaSum(c10::intrusive_ptr<c10d::ProcessGroup> group, std::int64_t bucket_bytes,
                       const std::vector<std::unique_ptr<GradAccumulator>>& gradients)
    : group_(std::move(group)),
      timeout_(timeout_of(group_.get())),
      gradients_(gradients),
      buckets_(gradients, bucket_bytes, [this](std::size_t bucket, std::size_t buffer) {
        under_way_.works.push_back(begin(bucket, buffer));
        return true;
      }) {}

c10::intrusive_ptr<c10d::Work> ReplicaSum::begin(std::size_t bucket, std::size_t buffer) const {
  const GradientBuckets::Bucket& mine = buckets_.buckets()[bucket];
  const at::Tensor& flat = gradients_[mine.dtype]->flat(buffer);
  std::vector<at::Tensor> part{flat.narrow(0, mine.begin, mine.end - mine.begin)};
  return group_->allreduce(part);
}

ReplicaSum::UnderWay ReplicaSum::end_batch(std::size_t buffer) {
  finish(buffer);
  buckets_.end_batch();
  return std::exchange(under_way_, {});
}

void ReplicaSum::settle(const std::function<bool()>& is_stopped) {
  if (!buckets_.is_last_microbatch() || under_way_.is_settled) {
    return;
  }
  finish(buffer_);
  for (const auto& work : std::exchange(under_way_.works, {})) {
    wait_for_work(*work, timeout_, !has_streams(gradients_.front()->flat(buffer_).device()),
                  is_stopped);
  }
  for (const auto& gradients : gradients_) {
    gradients->read_flags(buffer_);
  }
  under_way_.is_settled = true;
}

void ReplicaSum::finish(std::size_t buffer) {
  if (under_way_.is_settled) {
    return;
  }
  for (const auto& gradients : gradients_) {
    gradients->fill_missing(buffer);
  }
  buckets_.begin_rest(buffer);
}

}  // namespace pd2
