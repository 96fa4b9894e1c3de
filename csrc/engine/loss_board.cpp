#include "engine/loss_board.h"

#include "core/check.h"
#include "engine/this_thread.h"

#include <ATen/ops/empty.h>

namespace pd2 {
namespace {

constexpr int kLossTag = 7;

}  // namespace

LossBoard::LossBoard(std::shared_ptr<Fault> fault, c10::intrusive_ptr<c10d::ProcessGroup> group,
                     const std::vector<int>& ranks, int replica, int num_replicas)
    : fault_(std::move(fault)),
      group_(std::move(group)),
      last_stage_rank_(ranks.back()),
      last_stage_(stage_name(static_cast<int>(ranks.size()) - 1, replica, num_replicas)),
      readers_(ranks.begin(), ranks.end()) {
  readers_.erase(last_stage_rank_);
  if (!group_ || group_->getRank() == last_stage_rank_) {
    thread_ = std::thread([this] {
      name_this_thread("pd2 losses");
      send_losses();
    });
  } else {
    thread_ = std::thread([this] {
      name_this_thread("pd2 losses");
      receive_losses();
    });
  }
}

LossBoard::~LossBoard() { close(); }

std::shared_ptr<LossSlot> LossBoard::expect(std::int64_t batch) {
  auto slot = std::make_shared<LossSlot>();
  {
    const std::lock_guard lock(mutex_);
    expected_.emplace_back(batch, slot);
  }
  changed_.notify_all();
  return slot;
}

void LossBoard::publish(std::int64_t batch, BatchLoss loss) {
  {
    const std::lock_guard lock(mutex_);
    PD2_ASSERT(!expected_.empty() && expected_.front().first == batch, "loss of batch ", batch,
               " out of order");
    published_.push_back({batch, std::move(expected_.front().second), std::move(loss)});
    expected_.pop_front();
  }
  changed_.notify_all();
}

bool LossBoard::done(const LossSlot& slot) const {
  const std::lock_guard lock(mutex_);
  return slot.value.has_value();
}

bool LossBoard::wait_for(const LossSlot& slot, std::chrono::milliseconds timeout) const {
  std::unique_lock lock(mutex_);
  const bool there =
      changed_.wait_for(lock, timeout, [&] { return slot.value.has_value() || fault_->raised(); });
  if (there && !slot.value.has_value()) {
    fault_->rethrow_if_raised();
  }
  return there;
}

void LossBoard::send_losses() {
  while (true) {
    Published published;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return closed_ || !published_.empty(); });
      if (published_.empty()) {
        return;
      }
      published = published_.front();
    }
    try {
      const at::Tensor value =
          published.loss.sum().to(at::kCPU, at::kDouble).reshape({1}).contiguous();
      {
        const std::lock_guard lock(mutex_);
        published.slot->value = *value.const_data_ptr<double>();
      }
      changed_.notify_all();
      transfer([&] {
        std::vector<Work> works;
        for (int rank : readers_) {
          std::vector<at::Tensor> tensors{value};
          works.push_back(group_->send(tensors, rank, kLossTag));
        }
        return works;
      });
    } catch (const std::exception& error) {
      fail(published.batch, std::string("sending it failed: ") + error.what());
      return;
    }
    const std::lock_guard lock(mutex_);
    published_.pop_front();
    changed_.notify_all();
  }
}

void LossBoard::receive_losses() {
  while (true) {
    std::int64_t batch;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return closed_ || !expected_.empty(); });
      if (closed_) {
        return;
      }
      batch = expected_.front().first;
    }
    const at::Tensor value = at::empty({1}, at::kDouble);
    try {
      transfer([&] {
        std::vector<at::Tensor> tensors{value};
        return std::vector<Work>{group_->recv(tensors, last_stage_rank_, kLossTag)};
      });
    } catch (const std::exception& error) {
      fail(batch, "receiving it from rank " + std::to_string(last_stage_rank_) +
                      " failed: " + error.what());
      return;
    }
    const std::lock_guard lock(mutex_);
    if (closed_) {
      return;
    }
    expected_.front().second->value = *value.const_data_ptr<double>();
    expected_.pop_front();
    changed_.notify_all();
  }
}

template <typename Post>
void LossBoard::transfer(Post post) {
  std::vector<Work> works;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) {
      return;
    }
    works = under_way_ = post();
  }
  for (const Work& work : works) {
    work->wait();
  }
  const std::lock_guard lock(mutex_);
  under_way_.clear();
}

void LossBoard::fail(std::int64_t batch, const std::string& what) {
  {
    const std::lock_guard lock(mutex_);
    under_way_.clear();
    if (closed_) {
      return;
    }
  }
  fault_->raise(last_stage_ + ", batch " + std::to_string(batch) + ", loss: " + what);
  changed_.notify_all();
}

bool LossBoard::finish_for(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  const bool there = changed_.wait_for(
      lock, timeout, [&] { return (expected_.empty() && published_.empty()) || fault_->raised(); });
  if (there && !(expected_.empty() && published_.empty())) {
    fault_->rethrow_if_raised();
  }
  return there;
}

void LossBoard::close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    for (Work& work : under_way_) {
      work->abort();
    }
  }
  changed_.notify_all();
  if (thread_.joinable()) {
    thread_.join();
  }
  // Without Python's lock, if this is the last owner: the group's threads may need it to end.
  group_.reset();
}

}  // namespace pd2
