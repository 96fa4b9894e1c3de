#include "engine/fault.h"

#include "engine/at_once.h"
#include "transport/peer_error.h"

#include <c10/util/Exception.h>

#include <chrono>
#include <memory>
#include <semaphore>

namespace pd2 {
namespace {

// How long devices may go on before what they wait for is aborted.
constexpr auto kRest = std::chrono::seconds(2);

// And how long those may take then that tell other processes.
constexpr auto kTelling = std::chrono::milliseconds(100);

}  // namespace

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
  std::vector<std::function<void()>> aborts;
  {
    const std::lock_guard lock(mutex_);
    if (raised_) {
      return;
    }
    failure_ = std::move(failure);
    raised_ = true;
    aborts = std::exchange(aborts_, {});
  }
  // What the callbacks need may be held by a thread that waits for the device: then the aborts come
  // before the callbacks have ended.
  const auto until = std::chrono::steady_clock::now() + kRest;
  const auto rested = std::make_shared<std::counting_semaphore<>>(0);
  for (auto& abort : aborts) {
    abort = [=, abort = std::move(abort)] {
      static_cast<void>(rested->try_acquire_until(until + kTelling));
      abort();
    };
  }
  const auto num_aborts = static_cast<std::ptrdiff_t>(aborts.size());
  const AtOnce aborting(std::move(aborts));
  run_all(callbacks_);
  run_all(rests_, until);
  {
    const std::lock_guard lock(mutex_);
    has_rested_ = true;
    ended_.notify_all();
  }
  rested->release(num_aborts);
  aborting.wait();
}

template <typename Call, typename... Args>
void Fault::run_all(std::map<const void*, Call>& calls, Args... args) {
  std::unique_lock lock(mutex_);
  while (!calls.empty()) {
    const auto next = calls.extract(calls.begin());
    running_ = next.key();
    lock.unlock();
    next.mapped()(args...);
    lock.lock();
    running_ = nullptr;
    ended_.notify_all();
  }
}

std::optional<Failure> Fault::failure() const {
  const std::lock_guard lock(mutex_);
  return raised_ ? std::optional(failure_) : std::nullopt;
}

void Fault::on_raise(const void* owner, std::function<void()> end_waiting, Rest rest) {
  {
    const std::lock_guard lock(mutex_);
    if (!raised_) {
      callbacks_[owner] = std::move(end_waiting);
      if (rest) {
        rests_[owner] = std::move(rest);
      }
      return;
    }
  }
  end_waiting();
  if (rest) {
    rest(std::chrono::steady_clock::now() + kRest);
  }
}

void Fault::forget(const void* owner) {
  std::unique_lock lock(mutex_);
  callbacks_.erase(owner);
  rests_.erase(owner);
  ended_.wait(lock, [&] { return running_ != owner; });
}

void Fault::wait_for_rest() {
  std::unique_lock lock(mutex_);
  ended_.wait(lock, [&] { return !raised_ || has_rested_; });
}

void Fault::abort_on_raise(std::function<void()> abort) {
  {
    const std::lock_guard lock(mutex_);
    if (!raised_) {
      aborts_.push_back(std::move(abort));
      return;
    }
  }
  AtOnce({std::move(abort)}).wait();
}

void Fault::rethrow_if_raised() const {
  const std::lock_guard lock(mutex_);
  if (raised_) {
    throw PipelineError(failure_);
  }
}

}  // namespace pd2
