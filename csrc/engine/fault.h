// The first failure ends the pipeline, and everybody learns its cause.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

namespace pd2 {

// How failures name a stage.
std::string stage_name(int stage, int replica, int num_replicas);

// Thrown to those who wait for a pipeline that has failed; Python sees RuntimeError.
class PipelineError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Shared by all executors of one process. Thread-safe.
class Fault {
 public:
  // The first call's text is kept and the registered callbacks run (they end blocked channels);
  // later calls, mostly consequences of the first, are ignored.
  void raise(const std::string& cause);
  bool raised() const;
  std::string cause() const;
  // Runs `end_waiting` when the fault is raised, at once if it has been; until forgotten by
  // `owner`.
  void on_raise(const void* owner, std::function<void()> end_waiting);
  void forget(const void* owner);
  void rethrow_if_raised() const;

 private:
  mutable std::mutex mutex_;
  std::atomic<bool> raised_ = false;  // read under other locks, so not under mutex_
  std::string cause_;
  std::map<const void*, std::function<void()>> callbacks_;
};

}  // namespace pd2
