#include "engine/update/batch_verdicts.h"

#include "core/check.h"
#include "engine/channels/wait_for_work.h"
#include "engine/process_group.h"

#include <ATen/ops/tensor.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

namespace pd2 {

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
    finish_until(lock, is_stopped, [this] { return !under_way_; });  // which nobody asked for
    begin_exchange();
    under_way_ = run;
  }
  changed_.notify_all();
}

void BatchVerdicts::wait(std::int64_t run, const std::function<bool()>& is_stopped) {
  std::unique_lock lock(mutex_);
  finish_until(lock, is_stopped, [this, run] { return newest_known_ >= run; });
}

void BatchVerdicts::finish_until(std::unique_lock<std::mutex>& lock,
                                 const std::function<bool()>& is_stopped,
                                 const std::function<bool()>& is_over) {
  while (true) {
    wait_until(changed_, lock, is_stopped,
               [&] { return is_over() || (under_way_ && !is_finishing_); });
    if (is_over()) {
      return;
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
  return std::ranges::min(pd2::finish_exchange(*shared_, "word on a batch", is_stopped));
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
