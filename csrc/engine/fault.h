// The first failure ends the pipeline, and everybody learns its cause.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace pd2 {

// How failures name a stage.
std::string stage_name(int stage, int replica, int num_replicas);

// What failed where: the data of pipedream2bw.errors.StageError.
struct Failure {
  std::string type = "StageError";  // the name of a class of pipedream2bw/errors.py
  std::string text{};               // place and cause, for people
  std::optional<int> rank{};        // that failed; of a peer that was lost: that one
  std::optional<int> stage{}, replica{};
  std::optional<std::int64_t> batch{};
  std::optional<int> microbatch{};  // in the batch
  std::optional<std::string> action{};
  std::string cause{};      // the exception, with its type if it is Python's
  std::string traceback{};  // the whole of it, for logs; empty: none
  // The number by which this process's Python keeps the exception; negative: it does not.
  int kept = -1;
};

// Type, cause, traceback and rank of an exception of C++: `here` unless it tells another rank.
Failure failure_of(const std::exception_ptr& error, int here);

// Thrown to those who wait for a pipeline that has failed; Python sees StageError.
class PipelineError : public std::runtime_error {
 public:
  explicit PipelineError(Failure failure)
      : std::runtime_error(failure.text), failure_(std::move(failure)) {}

  const Failure& failure() const { return failure_; }

 private:
  Failure failure_;
};

// Shared by all executors of one process. Thread-safe.
class Fault {
 public:
  // `rank`: this process among the pipeline's.
  explicit Fault(int rank = 0) : rank_(rank) {}

  int rank() const { return rank_; }
  // The first call's failure is kept and what was registered runs, without a lock; later calls,
  // mostly consequences of the first, are ignored.
  void raise(Failure failure);
  bool raised() const { return raised_; }
  // The first failure, if there is one.
  std::optional<Failure> failure() const;
  // Runs `end_waiting`, which waits for nothing, when the fault is raised, at once if it has been;
  // until forgotten by `owner`. None of them runs any more when forget() returns.
  //
  // `rest` runs after all of these, and waits for a while until devices have done what they were
  // given, as what other processes have sent so far still comes. That while may be over by then.
  using Rest = std::function<void(std::chrono::steady_clock::time_point until)>;
  void on_raise(const void* owner, std::function<void()> end_waiting, Rest rest = {});
  void forget(const void* owner);
  // Returns when no such `rest` runs or is still to run.
  void wait_for_rest();
  // Runs `abort` after that, or when that while is over, in a thread of its own: it may wait for
  // what the others end. It may run longer than raise(), which waits for a while, and keeps what it
  // uses.
  void abort_on_raise(std::function<void()> abort);
  void rethrow_if_raised() const;

 private:
  const int rank_;
  mutable std::mutex mutex_;
  std::condition_variable ended_;     // of a callback
  std::atomic<bool> raised_ = false;  // read under other locks, so not under mutex_
  Failure failure_;
  // Runs what owners gave, one after the other, which is forgotten.
  template <typename Call, typename... Args>
  void run_all(std::map<const void*, Call>& calls, Args... args);

  std::map<const void*, std::function<void()>> callbacks_;
  std::map<const void*, Rest> rests_;
  const void* running_ = nullptr;  // whose callback runs now
  bool has_rested_ = false;
  std::vector<std::function<void()>> aborts_;
};

}  // namespace pd2
