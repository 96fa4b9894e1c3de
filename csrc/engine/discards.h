// The first batch that is discarded, with all after it, because the user's code failed in it.
#pragma once

#include "engine/fault.h"
#include "transport/shared_board.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

namespace pd2 {

// Shared by all executors of a process. What the user's code raises in a batch ends nothing: the
// batch goes on without computing, so that whoever waits for its messages gets some, and is taken
// back once the pipeline is drained. Later batches, which may have read what it would have made
// older, go with it. Thread-safe.
//
// Processes that share memory learn of a discarded batch before they get a message of it that has
// no content. Others learn of it when all agree on the batch's update, see BatchVerdicts.
class Discards {
 public:
  static constexpr std::int64_t kNone = (std::int64_t{1} << 40) - 1;

  // `shared`: by all processes; null: they share no memory, or there is one.
  explicit Discards(std::shared_ptr<SharedBoard> shared)
      : shared_(std::move(shared)), word_(shared_ ? &shared_->word() : &own_) {}

  // Discards the batch and all later ones because of what happened here.
  void discard(std::int64_t batch, Failure failure) {
    {
      const std::lock_guard lock(mutex_);
      if (!failure_ || batch < failure_->first) {
        failure_.emplace(batch, std::move(failure));
      }
    }
    discard(batch);
  }
  // It happened elsewhere.
  void discard(std::int64_t batch) {
    const std::uint64_t mine = generation_ << 40 | static_cast<std::uint64_t>(kNone - batch);
    std::uint64_t known = word_->load();
    while (known < mine && !word_->compare_exchange_weak(known, mine)) {
    }
  }
  // The first discarded batch; kNone if there is none.
  std::int64_t first() const {
    const std::uint64_t word = word_->load();
    return word >> 40 == generation_ ? kNone - static_cast<std::int64_t>(word & kNone) : kNone;
  }
  bool covers(std::int64_t batch) const { return batch >= first(); }
  // The failure of the earliest batch among those that happened in this process.
  std::optional<std::pair<std::int64_t, Failure>> failure() const {
    const std::lock_guard lock(mutex_);
    return failure_;
  }
  // The discarded batches have been taken back, in all processes. All stages are idle.
  void go_on() {
    const std::lock_guard lock(mutex_);
    failure_.reset();
    ++generation_;
  }

 private:
  const std::shared_ptr<SharedBoard> shared_;
  std::atomic<std::uint64_t> own_ = 0;
  // The generation, then how much earlier than kNone the first discarded batch is: the largest
  // value counts. A process that goes on first need not wait for the others to clear it.
  std::atomic<std::uint64_t>* const word_;
  std::atomic<std::uint64_t> generation_ = 0;
  mutable std::mutex mutex_;
  std::optional<std::pair<std::int64_t, Failure>> failure_;
};

}  // namespace pd2
