// Numbers that a thread of the engine gives and any other may wait for.
#pragma once

#include "engine/fault.h"

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <utility>
#include <vector>

namespace pd2 {

// A batch's loss and metrics, or a norm. Thread-safe.
class AwaitedNumbers {
 public:
  explicit AwaitedNumbers(std::shared_ptr<const Fault> fault) : fault_(std::move(fault)) {}

  // Either of these once. None: the batch was discarded.
  void give(std::vector<double> numbers) {
    give_later([numbers = std::move(numbers)] { return numbers; });
  }
  // Those that `read` returns. The first who gets them calls it, and may wait for a device there.
  void give_later(std::function<std::vector<double>()> read) {
    promise_.set_value(std::async(std::launch::deferred, std::move(read)).share());
  }

  bool are_there() const { return is_ready(std::chrono::milliseconds(0)); }
  // True if they are there within `timeout`. If they are not: throws PipelineError if the pipeline
  // has failed. A failure does not end the wait early, so callers wait in short slices.
  bool wait_for(std::chrono::milliseconds timeout) const {
    const bool there = is_ready(timeout);
    if (!there) {
      fault_->rethrow_if_raised();
    }
    return there;
  }
  // Once they are there.
  const std::vector<double>& get() const { return numbers_.get().get(); }

 private:
  bool is_ready(std::chrono::milliseconds timeout) const {
    return numbers_.wait_for(timeout) == std::future_status::ready;
  }

  const std::shared_ptr<const Fault> fault_;
  using Numbers = std::shared_future<std::vector<double>>;
  std::promise<Numbers> promise_;
  const std::shared_future<Numbers> numbers_ = promise_.get_future().share();
};

}  // namespace pd2
