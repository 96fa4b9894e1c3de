// A thread that does one job at a time.
#pragma once

#include "core/check.h"

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

namespace pd2 {

// One thread calls start(), wait_for() and the destructor.
class Background {
 public:
  // `begin` is called in the thread before this returns.
  explicit Background(std::function<void()> begin)
      : job_(std::move(begin)), thread_([this] { loop(); }) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !busy_; });
  }
  // Waits for the job.
  ~Background() {
    {
      const std::lock_guard lock(mutex_);
      closed_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  // The one before must have ended. `job` must not throw.
  void start(std::function<void()> job) {
    {
      const std::lock_guard lock(mutex_);
      PD2_ASSERT(!busy_, "a job is still under way");
      busy_ = true;
      job_ = std::move(job);
    }
    changed_.notify_all();
  }

  // True when there is no job, within `timeout`.
  bool wait_for(std::chrono::milliseconds timeout) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, timeout, [this] { return !busy_; });
  }

 private:
  void loop() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return closed_ || busy_; });
      if (!busy_) {
        return;
      }
      std::function<void()> job = std::exchange(job_, nullptr);
      lock.unlock();
      job();
      job = nullptr;  // what it held may need other locks to end
      lock.lock();
      busy_ = false;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void()> job_;
  bool busy_ = true;  // until it has begun
  bool closed_ = false;
  std::thread thread_;
};

}  // namespace pd2
