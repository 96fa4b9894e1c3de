// Calls that are made at once, since each may wait for the others.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <semaphore>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace pd2 {

// Calls that have begun, each in a thread of its own, which may outlive this.
class AtOnce {
 public:
  explicit AtOnce(std::vector<std::function<void()>> calls) : num_calls_(calls.size()) {
    for (const auto& call : calls) {
      try {
        std::thread([call = call, ended = ended_]() mutable {
          call();
          call = nullptr;
          ended->release();
        }).detach();
      } catch (const std::system_error&) {  // the process may have no more threads
        left_.push_back(call);
      }
    }
  }

  // Until all have ended, for ten seconds at most. Makes those for which there was no thread.
  void wait() const {
    for (const auto& call : left_) {
      call();
      ended_->release();
    }
    const auto deadline = std::chrono::steady_clock::now() + kMost;
    for (std::size_t i = 0; i < num_calls_ && ended_->try_acquire_until(deadline); ++i) {
    }
  }

 private:
  static constexpr auto kMost = std::chrono::seconds(10);

  const std::size_t num_calls_;
  std::vector<std::function<void()>> left_;
  const std::shared_ptr<std::counting_semaphore<>> ended_ =
      std::make_shared<std::counting_semaphore<>>(0);
};

}  // namespace pd2
