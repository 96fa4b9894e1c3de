#include "engine/gradients/replica_sum.h"

#include "core/check.h"
#include "engine/channels/wait_for_work.h"

#include <algorithm>
#include <utility>

namespace pd2 {

ReplicaSum::ReplicaSum(c10::intrusive_ptr<c10d::ProcessGroup> group, std::int64_t bucket_bytes,
                       const std::vector<std::unique_ptr<GradAccumulator>>& gradients)
    : group_(std::move(group)), timeout_(timeout_of(group_.get())), gradients_(gradients) {
  for (std::size_t dtype = 0; dtype < gradients.size(); ++dtype) {
    add_buckets(dtype, bucket_bytes);
  }
  if (std::ranges::none_of(buckets_, &Bucket::is_early)) {
    return;  // no sum begins before the end, whatever comes
  }
  for (std::size_t dtype = 0; dtype < gradients.size(); ++dtype) {
    times_.emplace_back(gradients[dtype]->packing().views().size());
    gradients[dtype]->on_added([this, dtype](std::size_t parameter) { came(dtype, parameter); });
  }
}

void ReplicaSum::add_buckets(std::size_t dtype, std::int64_t bucket_bytes) {
  const at::Tensor& flat = gradients_[dtype]->flat(0);
  const FlatPacking& packing = gradients_[dtype]->packing();
  const std::size_t count = packing.views().size();
  std::size_t last = count;
  std::int64_t end = packing.numel(), bytes = 0;
  for (std::size_t first = count; first-- > 0;) {
    const ParameterView& view = packing.views()[first];
    bytes += view.numel * flat.element_size();
    if (bytes >= bucket_bytes && first > 0) {
      buckets_.push_back({dtype, first, last, view.offset, end, true});
      last = first;
      end = view.offset;
      bytes = 0;
    }
  }
  if (last == count) {
    buckets_.push_back({dtype, 0, last, 0, flat.numel(), false});
    return;
  }
  buckets_.push_back({dtype, 0, last, 0, end, true});
  buckets_.push_back({dtype, 0, count, packing.numel(), flat.numel(), false});
}

void ReplicaSum::begin_microbatch(std::size_t buffer, bool is_last) {
  buffer_ = buffer;
  is_last_ = is_last;
  for (std::vector<Times>& of_dtype : times_) {
    for (Times& times : of_dtype) {
      times.in_this_microbatch = 0;
    }
  }
}

void ReplicaSum::came(std::size_t dtype, std::size_t parameter) {
  Times& times = times_[dtype][parameter];
  ++times.in_this_microbatch;
  if (!is_last_) {
    times.at_most = std::max(times.at_most, times.in_this_microbatch);
    return;
  }
  for (std::size_t bucket = 0; bucket < under_way_.works.size(); ++bucket) {
    const Bucket& begun = buckets_[bucket];
    PD2_CHECK(begun.dtype != dtype || parameter < begun.first || parameter >= begun.last,
              "gradients of one parameter in a microbatch: ", times.in_this_microbatch,
              ", most before: ", times.at_most,
              ": replicas already add them up; give bucket_cap_mb=math.inf");
  }
  while (under_way_.works.size() < buckets_.size() &&
         is_complete(buckets_[under_way_.works.size()])) {
    under_way_.works.push_back(begin(buckets_[under_way_.works.size()], buffer_));
  }
}

bool ReplicaSum::is_complete(const Bucket& bucket) const {
  const auto& times = times_[bucket.dtype];
  return bucket.is_early &&
         std::all_of(times.begin() + std::ptrdiff_t(bucket.first),
                     times.begin() + std::ptrdiff_t(bucket.last), [](const Times& of_one) {
                       return of_one.at_most > 0 && of_one.in_this_microbatch >= of_one.at_most;
                     });
}

c10::intrusive_ptr<c10d::Work> ReplicaSum::begin(const Bucket& bucket, std::size_t buffer) const {
  const at::Tensor& flat = gradients_[bucket.dtype]->flat(buffer);
  std::vector<at::Tensor> part{flat.narrow(0, bucket.begin, bucket.end - bucket.begin)};
  return group_->allreduce(part);
}

ReplicaSum::UnderWay ReplicaSum::end_batch(std::size_t buffer) {
  is_last_ = false;
  for (std::vector<Times>& of_dtype : times_) {
    for (Times& times : of_dtype) {
      times.at_most = std::max(times.at_most, times.in_this_microbatch);
    }
  }
  finish(under_way_, buffer);
  return std::exchange(under_way_, {});
}

void ReplicaSum::settle(const std::function<bool()>& is_stopped) {
  if (!is_last_ || under_way_.is_settled) {
    return;
  }
  finish(under_way_, buffer_);
  for (const auto& work : std::exchange(under_way_.works, {})) {
    wait_for_work(*work, timeout_, !gradients_.front()->flat(buffer_).is_cuda(), is_stopped);
  }
  for (const auto& gradients : gradients_) {
    gradients->read_flags(buffer_);
  }
  under_way_.is_settled = true;
}

void ReplicaSum::finish(UnderWay& sum, std::size_t buffer) const {
  if (sum.is_settled) {
    return;
  }
  for (const auto& gradients : gradients_) {
    gradients->fill_missing(buffer);
  }
  for (std::size_t bucket = sum.works.size(); bucket < buckets_.size(); ++bucket) {
    sum.works.push_back(begin(buckets_[bucket], buffer));
  }
}

}  // namespace pd2
