#include "engine/gradients/replica_sum.h"

#include "core/check.h"
#include "engine/channels/wait_for_work.h"

#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

namespace pd2 {
namespace {

using Sizes = std::vector<std::int64_t>;

// While one part's pieces are added and its sums sent, another one's come.
constexpr std::size_t kMostLanes = 2;
// Buckets of single parameters are not cut further.
constexpr std::int64_t kLeastPart = std::int64_t{1} << 20;

// Two names of one function, the first of which older releases of torch do not have.
template <typename Group>
c10::intrusive_ptr<c10d::Work> all_to_all(Group& group, at::Tensor to, at::Tensor from,
                                          Sizes to_sizes, Sizes from_sizes) {
  if constexpr (requires { group.all_to_all_single(to, from, to_sizes, from_sizes); }) {
    return group.all_to_all_single(to, from, to_sizes, from_sizes);
  } else {
    return group.alltoall_base(to, from, to_sizes, from_sizes);
  }
}

template <typename Group>
c10::intrusive_ptr<c10d::Work> all_gather(Group& group, at::Tensor to, at::Tensor from) {
  if constexpr (requires { group.all_gather_single(to, from); }) {
    return group.all_gather_single(to, from);
  } else {
    return group._allgather_base(to, from);
  }
}

}  // namespace

ReplicaSum::ReplicaSum(Replicas replicas, std::int64_t bucket_bytes,
                       const std::vector<std::unique_ptr<GradAccumulator>>& gradients,
                       MaybeStream stream)
    : replicas_(std::move(replicas)),
      rank_(replicas_.group->getRank()),
      size_(replicas_.group->getSize()),
      timeout_(timeout_of(replicas_.group.get())),
      gradients_(gradients),
      stream_(stream),
      buckets_(gradients, bucket_bytes, [this](std::size_t bucket, std::size_t buffer) {
        next_->buffer = buffer;
        make_ready(bucket);
        return true;
      }) {
  PD2_ASSERT(size_ > 1, "replicas: ", size_);
  PD2_ASSERT(!is_ordered() || static_cast<int>(replicas_.order.size()) == size_, "an order of ",
             replicas_.order.size(), " ranks of ", size_);
  cut(bucket_bytes);
  lanes_.resize(is_ordered() ? std::min(kMostLanes, parts_.size()) : 0);
  std::int64_t most = 0;
  for (const Part& part : parts_) {
    most = std::max(most, pieces(part)[rank_] * size_ * flat(part, 0).element_size());
  }
  for (at::Tensor& lane : lanes_) {
    lane = at::empty({most}, gradients_.front()->flat(0).options().dtype(at::kByte));
  }
}

// One parameter may have many more bytes than a bucket should: a lane must not.
void ReplicaSum::cut(std::int64_t part_bytes) {
  for (std::size_t bucket = 0; bucket < buckets().size(); ++bucket) {
    const GradientBuckets::Bucket& all = buckets()[bucket];
    const std::int64_t numel = all.end - all.begin;
    const std::int64_t bytes = numel * gradients_[all.dtype]->flat(0).element_size();
    const std::int64_t most = std::max(part_bytes, kLeastPart);
    const std::int64_t count = is_ordered() ? (bytes - 1) / most + 1 : 1;
    for (std::int64_t i = 0; i < count; ++i) {
      parts_.push_back(
          {bucket, all.begin + numel * i / count, all.begin + numel * (i + 1) / count});
    }
  }
}

void ReplicaSum::make_ready(std::size_t bucket) {
  while (next_->num_ready < parts_.size() && parts_[next_->num_ready].bucket <= bucket) {
    ++next_->num_ready;
  }
  if (before_ && !before_->is_over) {
    return;
  }
  if (stream_) {
    Fence::here(stream_->device()).hold_back(stream_);
  }
  const OnStream guard(stream_);
  while (advance(*next_, nullptr)) {
  }
}

ReplicaSum::UnderWay ReplicaSum::end_batch(std::size_t buffer) {
  PD2_ASSERT(!before_ || before_->is_over, "the sum of the batch before is under way");
  fill(buffer);
  buckets_.end_batch();
  before_ = std::exchange(next_, std::make_shared<Batch>());
  return before_;
}

void ReplicaSum::settle(const IsStopped& is_stopped) {
  if (!buckets_.is_last_microbatch() || next_->is_settled) {
    return;
  }
  fill(next_->buffer);
  finish(*next_, is_stopped);
  for (const auto& gradients : gradients_) {
    gradients->read_flags(next_->buffer);
  }
  next_->is_settled = true;
}

void ReplicaSum::fill(std::size_t buffer) {
  if (next_->is_settled) {
    return;
  }
  for (const auto& gradients : gradients_) {
    gradients->fill_missing(buffer);
  }
  buckets_.begin_rest(buffer);
}

void ReplicaSum::finish(Batch& batch, const IsStopped& is_stopped, const Then& then) {
  if (batch.is_settled) {
    return;
  }
  const MaybeStream here = stream_ ? stream_here(stream_->device()) : std::nullopt;
  Fence::of(here).hold_back(stream_);
  {
    const OnStream guard(stream_);
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      while (batch.num_summed <= i) {
        advance(batch, &is_stopped);
      }
      batch.is_over = batch.num_summed == parts_.size();
      await(batch.works[i], &is_stopped);
      if (i + 1 == parts_.size() || parts_[i + 1].bucket != parts_[i].bucket) {
        then(buckets()[parts_[i].bucket]);
      }
    }
    batch.is_over = true;
  }
  Fence::of(stream_).hold_back(here);
}

bool ReplicaSum::advance(Batch& batch, const IsStopped* is_stopped) {
  const std::size_t num_lanes = is_ordered() ? lanes_.size() : parts_.size();
  batch.works.resize(parts_.size());
  if (batch.num_sent < std::min(batch.num_summed + num_lanes, parts_.size())) {
    const std::size_t next = batch.num_sent;
    if (next == batch.num_ready) {
      return false;
    }
    batch.works[next] = send(next, batch.buffer);
    ++batch.num_sent;
    return true;
  }
  const std::size_t next = batch.num_summed;
  if (next == parts_.size() || (is_ordered() && !await(batch.works[next], is_stopped))) {
    return false;
  }
  if (is_ordered()) {
    batch.works[next] = sum(next, batch.buffer);
  }
  ++batch.num_summed;
  return true;
}

bool ReplicaSum::await(const Exchange& exchange, const IsStopped* is_stopped) const {
  // A failure is for the thread that makes the update.
  const auto has_come = [](const auto& work) { return work->isCompleted() && !work->exception(); };
  if (!is_stopped && !stream_ && !std::ranges::all_of(exchange, has_come)) {
    return false;
  }
  const IsStopped never = [] { return false; };
  for (const auto& work : exchange) {
    wait_for_work(*work, timeout_, /*on_host=*/!stream_, is_stopped ? *is_stopped : never);
  }
  return true;
}

ReplicaSum::Exchange ReplicaSum::send(std::size_t part, std::size_t buffer) const {
  const at::Tensor from = flat(parts_[part], buffer);
  if (!is_ordered()) {
    std::vector<at::Tensor> summed{from};
    return {replicas_.group->allreduce(summed)};
  }
  const Sizes sizes = pieces(parts_[part]);
  return {all_to_all(*replicas_.group, received(part), from, Sizes(size_, sizes[rank_]), sizes)};
}

ReplicaSum::Exchange ReplicaSum::sum(std::size_t part, std::size_t buffer) const {
  const at::Tensor all = flat(parts_[part], buffer);
  const Sizes sizes = pieces(parts_[part]);
  std::vector<at::Tensor> sums = all.split_with_sizes(sizes);
  const std::vector<at::Tensor> given = received(part).view({size_, sizes[rank_]}).unbind();
  const std::vector<int>& order = replicas_.order;
  at::add_out(sums[rank_], given[order[0]], given[order[1]]);
  for (int i = 2; i < size_; ++i) {
    sums[rank_].add_(given[order[i]]);
  }
  if (stream_ && all.numel() == size_ * sizes[rank_]) {
    return {all_gather(*replicas_.group, all, sums[rank_])};  // in place
  }
  // The host's all-gather would copy, and takes no pieces of different sizes.
  Exchange exchange;
  for (int rank = 0; rank < size_; ++rank) {
    if (sizes[rank] > 0) {
      std::vector<at::Tensor> tensors{sums[rank]};
      c10d::BroadcastOptions options;
      options.rootRank = rank;
      exchange.push_back(replicas_.group->broadcast(tensors, options));
    }
  }
  return exchange;
}

at::Tensor ReplicaSum::flat(const Part& part, std::size_t buffer) const {
  const GradAccumulator& gradients = *gradients_[buckets()[part.bucket].dtype];
  return gradients.flat(buffer).narrow(0, part.begin, part.end - part.begin);
}

std::vector<std::int64_t> ReplicaSum::pieces(const Part& part) const {
  const std::int64_t numel = part.end - part.begin;
  Sizes sizes;
  for (std::int64_t rank = 0; rank < size_; ++rank) {
    sizes.push_back(numel * (rank + 1) / size_ - numel * rank / size_);
  }
  return sizes;
}

at::Tensor ReplicaSum::received(std::size_t part) const {
  const at::Tensor like = flat(parts_[part], 0);
  const std::int64_t numel = size_ * pieces(parts_[part])[rank_];
  const at::Tensor& lane = lanes_[part % lanes_.size()];
  return lane.narrow(0, 0, numel * like.element_size()).view(like.scalar_type());
}

std::int64_t ReplicaSum::bytes() const {
  std::int64_t bytes = 0;
  for (const at::Tensor& lane : lanes_) {
    bytes += static_cast<std::int64_t>(lane.nbytes());
  }
  return bytes;
}

}  // namespace pd2
