// Calls that are delayed, for tests and benchmarks.
#pragma once

#include "core/check.h"
#include "engine/this_thread.h"

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

namespace pd2 {

// Makes every call after a delay drawn evenly between two bounds, in the order of add(), in a
// thread of its own. Thread-safe.
class DelayedCalls {
 public:
  using Seconds = std::chrono::duration<double>;

  // Throws ValueError unless 0 <= shortest <= longest.
  DelayedCalls(Seconds shortest, Seconds longest, std::uint64_t seed) : random_(seed) {
    PD2_CHECK(shortest.count() >= 0 && longest >= shortest, "delay: from ", shortest.count(),
              " to ", longest.count(), " seconds: it must be 0 <= shortest <= longest");
    seconds_ = std::uniform_real_distribution(shortest.count(), longest.count());
    thread_ = std::thread([this] { loop(); });
  }
  // Drops the calls that are not due.
  ~DelayedCalls() {
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }
  DelayedCalls(const DelayedCalls&) = delete;
  DelayedCalls& operator=(const DelayedCalls&) = delete;

  void add(std::function<void()> call) {
    std::vector<std::function<void()>> made;  // goes without the lock
    {
      const std::lock_guard lock(mutex_);
      made.swap(made_);
      const auto delay = std::chrono::duration_cast<Clock::duration>(Seconds(seconds_(random_)));
      waiting_.emplace_back(Clock::now() + delay, std::move(call));
    }
    changed_.notify_one();
  }

 private:
  using Clock = std::chrono::steady_clock;

  void loop() {
    name_this_thread("pd2 delay");
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return ended_ || !waiting_.empty(); });
      if (ended_ || changed_.wait_until(lock, waiting_.front().first, [this] { return ended_; })) {
        return;
      }
      std::function<void()> call = std::move(waiting_.front().second);
      waiting_.pop_front();
      lock.unlock();
      call();
      lock.lock();
      // Kept until another thread drops it: freeing tensors may need Python's lock, whose holder
      // may be waiting for this thread.
      made_.push_back(std::move(call));
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::mt19937_64 random_;
  std::uniform_real_distribution<double> seconds_;
  std::deque<std::pair<Clock::time_point, std::function<void()>>> waiting_;
  std::vector<std::function<void()>> made_;
  bool ended_ = false;
  std::thread thread_;
};

}  // namespace pd2
