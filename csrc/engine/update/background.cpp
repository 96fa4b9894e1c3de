#include "engine/update/background.h"

#include "core/check.h"

#include <utility>

namespace pd2 {

Background::Background(std::function<void()> begin)
    : thread_([this, begin = std::move(begin)] { loop(begin); }) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !busy_; });
}

Background::~Background() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Background::start(std::function<void()> job) {
  {
    const std::lock_guard lock(mutex_);
    PD2_ASSERT(!busy_, "a job is still under way");
    busy_ = true;
    job_ = std::move(job);
  }
  changed_.notify_all();
}

bool Background::wait_for(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, timeout, [this] { return !busy_; });
}

void Background::loop(const std::function<void()>& begin) {
  begin();
  std::unique_lock lock(mutex_);
  while (true) {
    busy_ = false;
    changed_.notify_all();
    changed_.wait(lock, [this] { return closed_ || busy_; });
    if (!busy_) {
      return;
    }
    std::function<void()> job = std::exchange(job_, nullptr);
    lock.unlock();
    job();
    job = nullptr;  // what it held may need other locks to end
    lock.lock();
  }
}

}  // namespace pd2
