#include "engine/update/batch_verdicts.h"

#include "core/check.h"
#include "engine/channels/channel.h"
#include "engine/channels/wait_for_work.h"
#include "engine/clock.h"
#include "engine/release_group.h"

#include <ATen/ops/tensor.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <utility>
#include <vector>

namespace pd2 {
namespace {

constexpr auto kSlice = std::chrono::milliseconds(100);

}  // namespace

BatchVerdicts::BatchVerdicts(int num_stages, std::shared_ptr<Discards> discards,
                             c10::intrusive_ptr<c10d::ProcessGroup> group,
                             std::shared_ptr<SharedBoard> shared)
    : num_stages_(num_stages),
      discards_(std::move(discards)),
      group_(std::move(group)),
      shared_(std::move(shared)) {}

void BatchVerdicts::give(std::int64_t run, const std::function<bool()>& is_stopped) {
  std::unique_lock lock(mutex_);
  if (++given_[run] < num_stages_) {
    return;
  }
  given_.erase(run);
  if (!group_) {
    newest_known_ = run;
  } else {
    finish(lock, is_stopped);  // nobody may have asked for the one before
    begin_exchange();
    under_way_ = run;
  }
  changed_.notify_all();
}

void BatchVerdicts::wait(std::int64_t run, const std::function<bool()>& is_stopped) {
  std::unique_lock lock(mutex_);
  while (newest_known_ < run) {
    if (under_way_ && !is_finishing_) {
      finish(lock, is_stopped);
    } else if (changed_.wait_for(lock, kSlice) == std::cv_status::timeout) {
      lock.unlock();
      if (is_stopped()) {
        throw ChannelAborted();
      }
      lock.lock();
    }
  }
}

void BatchVerdicts::finish(std::unique_lock<std::mutex>& lock,
                           const std::function<bool()>& is_stopped) {
  while (under_way_) {
    if (is_finishing_) {
      changed_.wait_for(lock, kSlice);
      lock.unlock();
      if (is_stopped()) {
        throw ChannelAborted();
      }
      lock.lock();
      continue;
    }
    is_finishing_ = true;
    lock.unlock();
    const std::int64_t first = finish_exchange(is_stopped);
    if (first != Discards::kNone) {
      discards_->discard(first);
    }
    lock.lock();
    is_finishing_ = false;
    newest_known_ = *std::exchange(under_way_, std::nullopt);
    changed_.notify_all();
  }
}

void BatchVerdicts::begin_exchange() {
  const std::int64_t first = discards_->first();
  if (shared_) {
    shared_->begin_exchange(std::array{first});
    return;
  }
  value_ = at::tensor({first}, at::kLong);
  std::vector<at::Tensor> tensors{value_};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MIN;
  work_ = group_->allreduce(tensors, options);
}

std::int64_t BatchVerdicts::finish_exchange(const std::function<bool()>& is_stopped) {
  if (!shared_) {
    wait_for_work(*work_, timeout_of(group_.get()), /*on_host=*/true, is_stopped);
    return value_.item<std::int64_t>();
  }
  std::optional<std::vector<std::int64_t>> rows;
  const double start = now(), timeout = shared_->timeout().count();
  while (!(rows = shared_->finish_exchange(kSlice))) {
    if (is_stopped()) {
      throw ChannelAborted();
    }
    if (now() - start > timeout) {
      throw PeerTimeout("timeout: a rank gave no word on a batch for " + std::to_string(timeout) +
                        " seconds");
    }
  }
  return std::ranges::min(*rows);
}

void BatchVerdicts::forget() {
  const std::lock_guard lock(mutex_);
  PD2_ASSERT(!under_way_, "an exchange is under way");
  given_.clear();
  newest_known_ = -1;
}

void BatchVerdicts::drop_connections() {
  work_.reset();
  release_group(group_);
  if (shared_) {
    shared_->leave();
  }
}

}  // namespace pd2
