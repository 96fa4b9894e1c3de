#include "engine/stage/host_mirror.h"

#include "core/check.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>

#include <algorithm>

namespace pd2 {

HostMirror::HostMirror(const StageStreams& streams,
                       const std::vector<std::unique_ptr<GradAccumulator>>& gradients,
                       std::int64_t bucket_bytes, bool fetches_early)
    : device_(streams.device),
      down_(own_stream(device_)),
      up_(own_stream(device_)),
      of_device_(gradients) {
  for (const auto& of_dtype : gradients) {
    const FlatPacking& packing = of_dtype->packing();
    Part& part =
        parts_.emplace_back(Part{packing, allocate(packing.numel(), packing.dtype()),
                                 allocate(packing.numel(), of_dtype->flat(0).scalar_type())});
    part.has_gradient.assign(packing.views().size(), false);
    part.bucket_of.assign(packing.views().size(), 0);
  }
  for (const GradientBuckets::Bucket& each : GradientBuckets::cut(gradients, bucket_bytes)) {
    const std::int64_t end = std::min(each.end, parts_[each.dtype].packing.numel());
    if (each.begin < end) {  // else flags
      for (std::size_t i = each.first; i < each.last; ++i) {
        parts_[each.dtype].bucket_of[i] = buckets_.size();
      }
      buckets_.push_back({each.dtype, each.first, each.last, each.begin, end});
    }
  }
  if (fetches_early) {
    early_ = std::make_unique<GradientBuckets>(
        gradients, bucket_bytes, [this](std::size_t bucket, std::size_t buffer) {
          if (is_stepping_) {
            return false;  // with the gradients of the batch before
          }
          fetch(early_->buckets()[bucket], buffer);
          return true;
        });
  }
}

at::Tensor HostMirror::allocate(std::int64_t numel, at::ScalarType dtype) const {
  const at::TensorOptions options = at::TensorOptions(at::kCPU).dtype(dtype);
  if (!has_streams(device_)) {
    return zeros_on_huge_pages(numel, options);
  }
  return at::empty({numel}, options.pinned_memory(true)).zero_();
}

at::Tensor HostMirror::weight(std::size_t dtype, std::size_t index) const {
  const Part& part = parts_.at(dtype);
  return part.packing.view(part.weights, index);
}

void HostMirror::begin_microbatch(std::size_t buffer, bool is_last) {
  if (early_) {
    early_->begin_microbatch(buffer, is_last);
  }
}

void HostMirror::forget_microbatch() {
  if (early_) {
    early_->forget_microbatch();
  }
}

void HostMirror::begin_update(bool sums) {
  is_stepping_ = true;
  if (early_) {
    early_->end_batch();
  }
  const std::lock_guard lock(mutex_);
  is_released_ = !sums;
}

void HostMirror::fetch(const GradientBuckets::Bucket& bucket, std::size_t buffer) {
  const auto mine = std::ranges::find_if(buckets_, [&](const Bucket& each) {
    return each.dtype == bucket.dtype && each.first == bucket.first && each.last == bucket.last;
  });
  if (mine != buckets_.end()) {  // else flags
    fetch(*mine, buffer);
  }
}

void HostMirror::fetch(Bucket& bucket, std::size_t buffer) {
  const std::int64_t numel = bucket.end - bucket.begin;
  const at::Tensor from = of_device_[bucket.dtype]->flat(buffer).narrow(0, bucket.begin, numel);
  const at::Tensor to = parts_[bucket.dtype].gradients.narrow(0, bucket.begin, numel);
  Fence::here(device_).hold_back(down_);
  const OnStream guard(down_);
  to.copy_(from, /*non_blocking=*/true);
  bucket.fetched = Fence::of(down_);
  bucket.is_fetched = true;
}

void HostMirror::fetch_rest(std::size_t buffer) {
  for (Bucket& bucket : buckets_) {
    if (!bucket.is_fetched) {
      fetch(bucket, buffer);
    }
  }
  for (std::size_t dtype = 0; dtype < parts_.size(); ++dtype) {
    parts_[dtype].has_gradient = of_device_[dtype]->has_gradient(buffer);
  }
  release();
}

void HostMirror::release() {
  {
    const std::lock_guard lock(mutex_);
    is_released_ = true;
    released_ = Fence::of(down_);
  }
  changed_.notify_all();
}

bool HostMirror::wait_until_released(std::chrono::milliseconds at_most,
                                     const MaybeStream& compute) {
  std::unique_lock lock(mutex_);
  if (!changed_.wait_for(lock, at_most, [this] { return is_released_; })) {
    return false;
  }
  released_.hold_back(compute);
  return true;
}

at::Tensor HostMirror::gradient(std::size_t dtype, std::size_t index) const {
  const Part& part = parts_.at(dtype);
  buckets_[part.bucket_of.at(index)].fetched.wait();
  return part.packing.view(part.gradients, index);
}

void HostMirror::await(std::size_t bucket) const {
  buckets_[bucket].fetched.wait();
  buckets_[bucket].sent.wait();
}

void HostMirror::begin_sending() const {
  Fence::here(device_).hold_back(up_);
  Fence::of(down_).hold_back(up_);  // gradients may lie where the weights go
}

void HostMirror::send(std::size_t bucket, const at::Tensor& slot) {
  Bucket& mine = buckets_[bucket];
  const std::int64_t numel = mine.end - mine.begin;
  const OnStream guard(up_);
  slot.narrow(0, mine.begin, numel)
      .copy_(parts_[mine.dtype].weights.narrow(0, mine.begin, numel), /*non_blocking=*/true);
  mine.sent = Fence::of(up_);
}

void HostMirror::end_sending() const { Fence::of(up_).hold_back(stream_here(device_)); }

void HostMirror::end_update() {
  Fence::of(down_).hold_back(stream_here(device_));
  release();
  forget();
  is_stepping_ = false;
}

void HostMirror::forget() {
  for (Bucket& bucket : buckets_) {
    bucket.is_fetched = false;
  }
}

void HostMirror::take_weights(std::size_t dtype, const at::Tensor& slot) {
  const at::Tensor& mine = parts_.at(dtype).weights;
  for (const Bucket& bucket : buckets_) {
    bucket.sent.wait();
  }
  mine.copy_(slot.narrow(0, 0, mine.numel()));
}

void HostMirror::take_changes(const std::vector<at::Tensor>& slot,
                              const std::vector<at::Tensor>& masters) {
  if (!is_shown_.exchange(false)) {
    return;
  }
  for (std::size_t dtype = 0; dtype < parts_.size(); ++dtype) {
    at::Tensor master = masters[dtype];
    if (!master.defined()) {
      take_weights(dtype, slot[dtype]);
      continue;
    }
    const at::Tensor before = parts_[dtype].weights.clone();
    take_weights(dtype, slot[dtype]);
    const at::Tensor& now = parts_[dtype].weights;
    const at::Tensor is_changed = now.view(at::kShort).ne(before.view(at::kShort));
    if (master.scalar_type() == at::kFloat) {
      at::where_out(master, is_changed, now.to(at::kFloat), master);
    } else {
      master.masked_fill_(is_changed, 0);  // what rounding took off
    }
  }
}

PaddedBytes HostMirror::bytes() const {
  PaddedBytes sum;
  for (const Part& part : parts_) {
    const auto size =
        static_cast<std::int64_t>(part.weights.element_size() + part.gradients.element_size());
    sum.used += part.packing.parameter_numel() * size;
    sum.padding += (part.packing.numel() - part.packing.parameter_numel()) * size;
  }
  return sum;
}

}  // namespace pd2
