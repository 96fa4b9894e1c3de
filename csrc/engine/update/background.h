// A thread that does one job at a time.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace pd2 {

// One thread calls start(), wait_for() and the destructor.
class Background {
 public:
  // `begin` is called in the thread before this returns.
  explicit Background(std::function<void()> begin);
  // Waits for the job.
  ~Background();
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  // The one before must have ended. `job` must not throw.
  void start(std::function<void()> job);
  // True when there is no job, within `timeout`.
  bool wait_for(std::chrono::milliseconds timeout);

 private:
  void loop(const std::function<void()>& begin);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void()> job_;
  bool busy_ = true;  // until it has begun
  bool closed_ = false;
  std::thread thread_;
};

}  // namespace pd2
