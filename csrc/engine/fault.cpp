#include "engine/fault.h"

#include "transport/peer_error.h"

#include <c10/util/Exception.h>

namespace pd2 {

std::string stage_name(int stage, int replica, int num_replicas) {
  const std::string name = "stage " + std::to_string(stage);
  return num_replicas > 1 ? name + " of replica " + std::to_string(replica) : name;
}

Failure failure_of(const std::exception_ptr& error, int here) {
  Failure failure;
  failure.rank = here;
  try {
    std::rethrow_exception(error);
  } catch (const PeerError& peer) {
    failure.type = dynamic_cast<const PeerTimeout*>(&peer) ? "PeerTimeout" : "PeerLost";
    failure.rank = peer.rank();
    failure.cause = peer.what();
  } catch (const c10::Error& torchs) {
    failure.cause = torchs.what_without_backtrace();
    failure.traceback = torchs.what();
  } catch (const std::exception& other) {
    failure.cause = other.what();
  } catch (...) {
    failure.cause = "unknown exception";
  }
  return failure;
}

void Fault::raise(Failure failure) {
  // Callbacks run under the lock: forget() must not return while one still runs.
  const std::lock_guard lock(mutex_);
  if (raised_) {
    return;
  }
  failure_ = std::move(failure);
  raised_ = true;
  for (const auto& [owner, end_waiting] : callbacks_) {
    end_waiting();
  }
}

std::optional<Failure> Fault::failure() const {
  const std::lock_guard lock(mutex_);
  return raised_ ? std::optional(failure_) : std::nullopt;
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
    throw PipelineError(failure_);
  }
}

}  // namespace pd2
