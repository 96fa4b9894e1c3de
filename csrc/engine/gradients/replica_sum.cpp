#include "engine/gradients/replica_sum.h"

#include "core/check.h"
#include "engine/channels/channel.h"
#include "engine/channels/wait_for_work.h"

#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <chrono>

namespace pd2 {
namespace {

using Sizes = std::vector<std::int64_t>;

// While one part's pieces are added and its sums sent, another one's come.
constexpr std::size_t kMostLanes = 2;
// Buckets of single parameters are not cut further.
constexpr std::int64_t kLeastPart = std::int64_t{1} << 20;

}  // namespace

// A device's transfer counts from when it is given to the device, which may be batches behind, or
// wait for a message.
void ReplicaSum::leave_waits_to_engine() const {
  try {
    replicas_.group->getBackend(stream_->device_type())->setTimeout(std::chrono::days(1));
  } catch (const c10::Error&) {  // that backend's transfers have no timeout of their own
  }
}

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
      shares_(share_out(buckets_.buckets(), gradients, size_, {})) {
  PD2_ASSERT(size_ > 1, "replicas: ", size_);
  PD2_ASSERT(!is_ordered() || static_cast<int>(replicas_.order.size()) == size_, "an order of ",
             replicas_.order.size(), " ranks of ", size_);
  if (stream_) {
    leave_waits_to_engine();
  }
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
    most = std::max(most, part.pieces[rank_] * (size_ - 1) * flat(part, 0).element_size());
  }
  for (at::Tensor& lane : lanes_) {
    lane = at::empty({most}, gradients_.front()->flat(0).options().dtype(at::kByte));
  }
}

void ReplicaSum::share(bool is_shared, const MayCut& may_cut, const std::vector<Range>& wanted) {
  is_shared_ = is_shared;
  shares_ = share_out(buckets(), gradients_, size_, may_cut);
  wanted_.clear();
  for (std::size_t dtype = 0; dtype < gradients_.size(); ++dtype) {
    const std::int64_t begin = gradients_[dtype]->packing().numel();
    wanted_.push_back({dtype, size_ - 1, std::nullopt, begin, gradients_[dtype]->flat(0).numel()});
  }
  for (const Range& range : wanted) {
    std::optional<int> first;
    for (const Share& share : shares_) {  // of one bucket in the order of their elements
      const std::int64_t begin = std::max(share.begin, range.begin);
      const std::int64_t end = std::min(share.end, range.end);
      if (share.dtype != range.dtype || begin >= end) {
        continue;
      }
      if (range.is_for_all) {
        wanted_.push_back({range.dtype, share.rank, std::nullopt, begin, end});
      } else if (first) {
        wanted_.push_back({range.dtype, share.rank, first, begin, end});
      }
      first = first.value_or(share.rank);
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
  begin(*next_);
}

void ReplicaSum::begin(Batch& batch) {
  if (stream_) {
    Fence::here(stream_->device()).hold_back(stream_);
  }
  const OnStream guard(stream_);
  while (advance(batch, nullptr)) {
  }
}

ReplicaSum::UnderWay ReplicaSum::end_batch(std::size_t buffer) {
  PD2_ASSERT(!before_ || before_->is_over, "the sum of the batch before is under way");
  fill(buffer);
  next_->buffer = buffer;
  buckets_.end_batch();
  before_ = std::exchange(next_, std::make_shared<Batch>());
  if (stream_ && !hook_ && !before_->is_settled) {
    begin(*before_);
  }
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
  Fence::of(here()).hold_back(stream_);
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
  Fence::of(stream_).hold_back(here());
}

void ReplicaSum::begin_gather(std::size_t bucket, const std::vector<at::Tensor>& flats) {
  Fence::of(here()).hold_back(stream_);
  const OnStream guard(stream_);
  for (; num_gathered_ < bucket; ++num_gathered_) {
    const GradientBuckets::Bucket& next = buckets()[num_gathered_];
    const Exchange exchange = give_shares(next, flats[next.dtype]);
    gathered_.insert(gathered_.end(), exchange.begin(), exchange.end());
  }
}

void ReplicaSum::gather(Batch* batch, const std::vector<at::Tensor>& flats,
                        const IsStopped& is_stopped) {
  begin_gather(buckets().size(), flats);
  if (batch) {
    batch->is_over = true;
  }
  num_gathered_ = 0;
  {
    const OnStream guard(stream_);
    await(std::exchange(gathered_, {}), &is_stopped);
  }
  Fence::of(stream_).hold_back(here());
}

void ReplicaSum::set_hook(Hook hook) {
  PD2_ASSERT(!before_ || before_->is_over, "a sum is under way");
  hook_ = std::move(hook);
  lanes_.clear();
}

void ReplicaSum::call_hook(Batch& batch, std::optional<double> unscaling,
                           const IsStopped& is_stopped) {
  Fence::of(here()).hold_back(stream_);
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
  Fence::of(stream_).hold_back(here());
}

void ReplicaSum::let_end(Batch& batch, const IsStopped& is_stopped, bool is_finished) {
  if (!hook_ && !is_finished) {
    finish(batch, is_stopped);
  }
  batch.is_over = true;
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

Exchange ReplicaSum::send(std::size_t part, std::size_t buffer) const {
  const at::Tensor all = flat(parts_[part], buffer);
  if (!is_ordered()) {
    std::vector<at::Tensor> summed{all};
    return {replicas_.group->allreduce(summed)};
  }
  return swap_pieces(*replicas_.group, all.split_with_sizes(parts_[part].pieces), received(part));
}

Exchange ReplicaSum::sum(std::size_t part, std::size_t buffer) const {
  const at::Tensor all = flat(parts_[part], buffer);
  const std::vector<at::Tensor> pieces = all.split_with_sizes(parts_[part].pieces);
  std::vector<at::Tensor> given = received(part);
  given[rank_] = pieces[rank_];
  at::Tensor sum = given[replicas_.order.front()];
  for (int i = 1; i < size_; ++i) {
    const at::Tensor& next = given[replicas_.order[i]];
    // Where this rank's own gradients are, from these on.
    at::Tensor to = next.is_same(pieces[rank_]) ? next : sum;
    at::add_out(to, sum, next);
    sum = to;
  }
  if (is_shared_) {
    return give_wanted(parts_[part], all);
  }
  if (stream_ && all.numel() == size_ * pieces[rank_].numel()) {
    return gather_in_place(*replicas_.group, all, pieces[rank_]);
  }
  // The host's all-gather would copy, and takes no pieces of different sizes.
  return give_pieces(*replicas_.group, pieces);
}

Exchange ReplicaSum::give_wanted(const Part& part, const at::Tensor& all) const {
  Exchange exchange;
  for (const Wanted& wanted : wanted_) {
    const std::int64_t begin = std::max(wanted.begin, part.begin);
    const std::int64_t end = std::min(wanted.end, part.end);
    if (wanted.dtype == buckets()[part.bucket].dtype && begin < end) {
      const at::Tensor elements = all.narrow(0, begin - part.begin, end - begin);
      const Exchange more = wanted.to
                                ? give_one(*replicas_.group, wanted.from, *wanted.to, elements)
                                : broadcast_from(*replicas_.group, wanted.from, elements);
      exchange.insert(exchange.end(), more.begin(), more.end());
    }
  }
  return exchange;
}

Exchange ReplicaSum::give_shares(const GradientBuckets::Bucket& bucket,
                                 const at::Tensor& flat) const {
  const std::int64_t numel = gradients_[bucket.dtype]->packing().numel();
  if (!flat.defined() || bucket.begin == numel) {  // flags alone
    return {};
  }
  Sizes sizes(size_, 0);
  for (const Share& share : shares_) {
    if (share.dtype == bucket.dtype && share.begin >= bucket.begin && share.end <= bucket.end) {
      sizes[share.rank] = share.end - share.begin;
    }
  }
  const at::Tensor all = flat.narrow(0, bucket.begin, std::min(bucket.end, numel) - bucket.begin);
  return give_pieces(*replicas_.group, all.split_with_sizes(sizes));
}

MaybeStream ReplicaSum::here() const {
  return stream_ ? stream_here(stream_->device()) : std::nullopt;
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

std::vector<at::Tensor> ReplicaSum::received(std::size_t part) const {
  const at::Tensor like = flat(parts_[part], 0);
  const std::int64_t bytes = parts_[part].pieces[rank_] * like.element_size();
  const at::Tensor& lane = lanes_[part % lanes_.size()];
  std::vector<at::Tensor> pieces;
  std::int64_t begin = 0;
  for (int rank = 0; rank < size_; ++rank) {
    const std::int64_t size = rank == rank_ ? 0 : bytes;
    pieces.push_back(lane.narrow(0, begin, size).view(like.scalar_type()));
    begin += size;
  }
  return pieces;
}

std::int64_t ReplicaSum::bytes() const {
  std::int64_t bytes = 0;
  for (const at::Tensor& lane : lanes_) {
    bytes += static_cast<std::int64_t>(lane.nbytes());
  }
  return bytes;
}

}  // namespace pd2
