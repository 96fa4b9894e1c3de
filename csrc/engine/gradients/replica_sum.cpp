#include "engine/gradients/replica_sum.h"

#include "core/check.h"
#include "engine/channels/channel.h"
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
      part_bytes_(std::max(bucket_bytes, kLeastPart)),
      buckets_(gradients, bucket_bytes,
               [this](std::size_t bucket, std::size_t buffer) {
                 next_->buffer = buffer;
                 make_ready(bucket);
                 return true;
               }),
      shares_(share_out(buckets_.buckets(), gradients, size_)) {
  PD2_ASSERT(size_ > 1, "replicas: ", size_);
  PD2_ASSERT(!is_ordered() || static_cast<int>(replicas_.order.size()) == size_, "an order of ",
             replicas_.order.size(), " ranks of ", size_);
  cut();
}

// One parameter may have many more bytes than a bucket should: a lane must not.
void ReplicaSum::cut() {
  parts_.clear();
  for (std::size_t bucket = 0; bucket < buckets().size(); ++bucket) {
    const GradientBuckets::Bucket& all = buckets()[bucket];
    const std::int64_t numel = all.end - all.begin;
    Part whole{bucket, all.begin, all.end, {}};
    whole.pieces = pieces(whole);
    const std::int64_t count = is_ordered() ? (bytes_in_lane(whole) - 1) / part_bytes_ + 1 : 1;
    for (std::int64_t i = 0; i < count; ++i) {
      Part& part = parts_.emplace_back(
          Part{bucket, all.begin + numel * i / count, all.begin + numel * (i + 1) / count, {}});
      part.pieces = pieces(part);
    }
  }
  lanes_.assign(is_ordered() ? std::min(kMostLanes, parts_.size()) : 0, {});
  std::int64_t most = 0;
  for (const Part& part : parts_) {
    most = std::max(most, part.pieces[rank_] * size_ * flat(part, 0).element_size());
  }
  for (at::Tensor& lane : lanes_) {
    lane = at::empty({most}, gradients_.front()->flat(0).options().dtype(at::kByte));
  }
}

void ReplicaSum::share(bool is_shared, const std::vector<Range>& everywhere) {
  is_shared_ = is_shared;
  everywhere_.clear();
  for (std::size_t dtype = 0; dtype < gradients_.size(); ++dtype) {
    const std::int64_t begin = gradients_[dtype]->packing().numel();
    everywhere_.push_back({dtype, size_ - 1, 0, 0, begin, gradients_[dtype]->flat(0).numel()});
  }
  for (const Range& range : everywhere) {
    const auto share = std::ranges::find_if(shares_, [&](const Share& candidate) {
      return candidate.dtype == range.dtype && candidate.begin <= range.begin &&
             range.begin < candidate.end;
    });
    if (share != shares_.end()) {  // else it is empty
      everywhere_.push_back({range.dtype, share->rank, 0, 0, range.begin, range.end});
    }
  }
  cut();
}

void ReplicaSum::make_ready(std::size_t bucket) {
  while (next_->num_ready < parts_.size() && parts_[next_->num_ready].bucket <= bucket) {
    ++next_->num_ready;
  }
  if (hook_ || (before_ && !before_->is_over)) {
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
  next_->buffer = buffer;
  buckets_.end_batch();
  before_ = std::exchange(next_, std::make_shared<Batch>());
  return before_;
}

void ReplicaSum::settle(const IsStopped& is_stopped) {
  if (!buckets_.is_last_microbatch() || next_->is_settled || hook_) {
    return;
  }
  fill(next_->buffer);
  finish(*next_, is_stopped);
  if (is_shared_) {
    std::vector<at::Tensor> sums;
    for (const auto& gradients : gradients_) {
      sums.push_back(gradients->gradients(next_->buffer));
    }
    gather(nullptr, sums, is_stopped);
  }
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
    batch.is_over = !is_shared_;
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
      batch.is_over = !is_shared_ && batch.num_summed == parts_.size();
      await(batch.works[i], &is_stopped);
      if (i + 1 == parts_.size() || parts_[i + 1].bucket != parts_[i].bucket) {
        then(buckets()[parts_[i].bucket]);
      }
    }
    batch.is_over = !is_shared_;
  }
  Fence::of(stream_).hold_back(here);
}

void ReplicaSum::gather(Batch* batch, const std::vector<at::Tensor>& flats,
                        const IsStopped& is_stopped) {
  const MaybeStream here = stream_ ? stream_here(stream_->device()) : std::nullopt;
  Fence::of(here).hold_back(stream_);
  {
    const OnStream guard(stream_);
    Exchange exchange;
    for (const Share& share : shares_) {
      // As bytes: gloo sends no int16, which split masters are.
      const at::Tensor& flat = flats[share.dtype];
      if (flat.defined()) {
        const at::Tensor part = flat.narrow(0, share.begin, share.end - share.begin);
        exchange.push_back(broadcast(part.view(at::kByte), share.rank));
      }
    }
    if (batch) {
      batch->is_over = true;
    }
    await(exchange, &is_stopped);
  }
  Fence::of(stream_).hold_back(here);
}

void ReplicaSum::set_hook(Hook hook) {
  PD2_ASSERT(!before_ || before_->is_over, "a sum is under way");
  hook_ = std::move(hook);
  lanes_.clear();
}

void ReplicaSum::call_hook(Batch& batch, std::optional<double> unscaling,
                           const IsStopped& is_stopped) {
  const MaybeStream here = stream_ ? stream_here(stream_->device()) : std::nullopt;
  Fence::of(here).hold_back(stream_);
  {
    const OnStream guard(stream_);
    for (const auto& each : gradients_) {
      std::vector<at::Tensor> flags{each->flags(batch.buffer)};
      await({replicas_.group->allreduce(flags)}, &is_stopped);
    }
    std::vector<at::Tensor> given;
    for (const GradientBuckets::Bucket& bucket : buckets()) {
      if (const at::Tensor of_bucket = gradients(bucket, batch.buffer); of_bucket.numel() > 0) {
        given.push_back(of_bucket);
      }
    }
    if (!hook_(given, unscaling)) {
      throw ChannelAborted();
    }
    batch.is_over = true;
  }
  Fence::of(stream_).hold_back(here);
}

void ReplicaSum::let_end(Batch& batch, const IsStopped& is_stopped) {
  if (hook_) {
    batch.is_over = true;
  } else {
    finish(batch, is_stopped);
  }
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
  const Sizes& sizes = parts_[part].pieces;
  return {all_to_all(*replicas_.group, received(part), from, Sizes(size_, sizes[rank_]), sizes)};
}

ReplicaSum::Exchange ReplicaSum::sum(std::size_t part, std::size_t buffer) const {
  const at::Tensor all = flat(parts_[part], buffer);
  const Sizes& sizes = parts_[part].pieces;
  std::vector<at::Tensor> sums = all.split_with_sizes(sizes);
  const std::vector<at::Tensor> given = received(part).view({size_, sizes[rank_]}).unbind();
  const std::vector<int>& order = replicas_.order;
  at::add_out(sums[rank_], given[order[0]], given[order[1]]);
  for (int i = 2; i < size_; ++i) {
    sums[rank_].add_(given[order[i]]);
  }
  Exchange exchange;
  if (is_shared_) {
    for (const Share& wanted : everywhere_) {
      const std::int64_t begin = std::max(wanted.begin, parts_[part].begin);
      const std::int64_t end = std::min(wanted.end, parts_[part].end);
      if (wanted.dtype == buckets()[parts_[part].bucket].dtype && begin < end) {
        const at::Tensor sum = all.narrow(0, begin - parts_[part].begin, end - begin);
        exchange.push_back(broadcast(sum, wanted.rank));
      }
    }
    return exchange;
  }
  if (stream_ && all.numel() == size_ * sizes[rank_]) {
    return {all_gather(*replicas_.group, all, sums[rank_])};  // in place
  }
  // The host's all-gather would copy, and takes no pieces of different sizes.
  for (int rank = 0; rank < size_; ++rank) {
    if (sizes[rank] > 0) {
      exchange.push_back(broadcast(sums[rank], rank));
    }
  }
  return exchange;
}

c10::intrusive_ptr<c10d::Work> ReplicaSum::broadcast(at::Tensor tensor, int rank) const {
  std::vector<at::Tensor> tensors{std::move(tensor)};
  c10d::BroadcastOptions options;
  options.rootRank = rank;
  return replicas_.group->broadcast(tensors, options);
}

at::Tensor ReplicaSum::gradients(const GradientBuckets::Bucket& bucket, std::size_t buffer) const {
  const at::Tensor all = gradients_[bucket.dtype]->gradients(buffer);
  const std::int64_t begin = std::min(bucket.begin, all.numel());
  return all.narrow(0, begin, std::min(bucket.end, all.numel()) - begin);
}

at::Tensor ReplicaSum::flat(const Part& part, std::size_t buffer) const {
  const GradAccumulator& gradients = *gradients_[buckets()[part.bucket].dtype];
  return gradients.flat(buffer).narrow(0, part.begin, part.end - part.begin);
}

std::vector<std::int64_t> ReplicaSum::pieces(const Part& part) const {
  const std::int64_t numel = part.end - part.begin;
  if (!is_shared_) {
    Sizes sizes;
    for (std::int64_t rank = 0; rank < size_; ++rank) {
      sizes.push_back(numel * (rank + 1) / size_ - numel * rank / size_);
    }
    return sizes;
  }
  Sizes sizes(size_, 0);
  std::int64_t rest = numel;
  for (const Share& share : shares_) {
    const std::int64_t end = std::min(share.end, part.end);
    const std::int64_t both = end - std::max(share.begin, part.begin);
    if (share.dtype == buckets()[part.bucket].dtype && both > 0) {
      sizes[share.rank] += both;
      rest -= both;
    }
  }
  sizes.back() += rest;  // flags
  return sizes;
}

std::int64_t ReplicaSum::bytes_in_lane(const Part& part) const {
  const std::int64_t element = flat(part, 0).element_size();
  const std::int64_t bytes = (part.end - part.begin) * element;
  if (!is_shared_) {
    return bytes;
  }
  // Whole, all ranks add at once; what is cut off may be one rank's alone.
  const std::int64_t most = *std::ranges::max_element(part.pieces) * size_ * element;
  return most <= 2 * part_bytes_ ? std::min(most, part_bytes_) : size_ * bytes;
}

at::Tensor ReplicaSum::received(std::size_t part) const {
  const at::Tensor like = flat(parts_[part], 0);
  const std::int64_t numel = size_ * parts_[part].pieces[rank_];
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
