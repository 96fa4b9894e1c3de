#include "testing/delayed_sender.h"

#include "core/check.h"
#include "engine/this_thread.h"

#include <utility>

namespace pd2 {

DelayedSender::DelayedSender(std::shared_ptr<Sender> sender, Seconds shortest, Seconds longest,
                             std::uint64_t seed)
    : sender_(std::move(sender)), random_(seed) {
  PD2_CHECK(shortest.count() >= 0 && longest >= shortest, "delay: from ", shortest.count(), " to ",
            longest.count(), " seconds: it must be 0 <= shortest <= longest");
  seconds_ = std::uniform_real_distribution(shortest.count(), longest.count());
  thread_ = std::thread([this] { loop(); });
}

DelayedSender::~DelayedSender() {
  abort();
  thread_.join();
}

void DelayedSender::send(LayoutId layout, Message message) {
  const auto delay =
      std::chrono::duration_cast<std::chrono::steady_clock::duration>(Seconds(seconds_(random_)));
  const auto due = std::chrono::steady_clock::now() + delay;
  {
    const std::lock_guard lock(mutex_);
    if (error_) {
      std::rethrow_exception(error_);
    }
    if (aborted_) {
      throw ChannelAborted();
    }
    under_way_.push_back({due, layout, std::move(message)});
  }
  changed_.notify_one();
}

void DelayedSender::abort() {
  {
    const std::lock_guard lock(mutex_);
    aborted_ = true;
  }
  changed_.notify_one();
  sender_->abort();
}

void DelayedSender::loop() {
  name_this_thread("pd2 delay");
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return aborted_ || !under_way_.empty(); });
    if (!aborted_) {
      changed_.wait_until(lock, under_way_.front().due, [this] { return aborted_; });
    }
    if (aborted_) {
      return;
    }
    Delayed next = std::move(under_way_.front());
    under_way_.pop_front();
    lock.unlock();
    try {
      sender_->send(next.layout, std::move(next.message));
    } catch (...) {
      lock.lock();
      error_ = std::current_exception();
      return;
    }
    lock.lock();
  }
}

}  // namespace pd2
