#include "engine/fault.h"

namespace pd2 {

std::string stage_name(int stage, int replica, int num_replicas) {
  const std::string name = "stage " + std::to_string(stage);
  return num_replicas > 1 ? name + " of replica " + std::to_string(replica) : name;
}

void Fault::raise(const std::string& cause) {
  // Callbacks run under the lock: forget() must not return while one still runs.
  const std::lock_guard lock(mutex_);
  if (raised_) {
    return;
  }
  cause_ = cause;
  raised_ = true;
  for (const auto& [owner, end_waiting] : callbacks_) {
    end_waiting();
  }
}

bool Fault::raised() const { return raised_; }

std::string Fault::cause() const {
  const std::lock_guard lock(mutex_);
  return cause_;
}

void Fault::on_raise(const void* owner, std::function<void()> end_waiting) {
  const std::lock_guard lock(mutex_);
  if (raised_) {
    end_waiting();
  } else {
    callbacks_[owner] = std::move(end_waiting);
  }
}

void Fault::forget(const void* owner) {
  const std::lock_guard lock(mutex_);
  callbacks_.erase(owner);
}

void Fault::rethrow_if_raised() const {
  const std::lock_guard lock(mutex_);
  if (raised_) {
    throw PipelineError(cause_);
  }
}

}  // namespace pd2
