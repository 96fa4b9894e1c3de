// How far a stage's device may be behind its host.
#pragma once

#include "engine/streams.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>

namespace pd2 {

// The microbatches that a stage has forgotten and its device may not have reached: their memory is
// not free before. Used by the executor's thread. On the CPU there are none.
class DeviceBacklog {
 public:
  // A microbatch, which has received so many bytes, needs nothing any more but the work that the
  // stream has been given.
  void add(const MaybeStream& compute, std::int64_t bytes) {
    if (compute) {
      behind_.push_back({Fence::of(compute), bytes});
      bytes_ += bytes;
      most_bytes_ = std::max(most_bytes_.load(), bytes_);
    }
  }
  // Until few are left.
  void wait() {
    while (behind_.size() > kMost) {
      behind_.front().end.wait();
      bytes_ -= behind_.front().bytes;
      behind_.pop_front();
    }
  }
  void clear() {
    behind_.clear();
    bytes_ = 0;
  }
  // Of messages. From any thread.
  std::int64_t most_bytes() const { return most_bytes_; }

 private:
  // Microbatches: with fewer a device could be through before its host has given it more.
  static constexpr std::size_t kMost = 2;

  struct Behind {
    Fence end;
    std::int64_t bytes;
  };
  std::deque<Behind> behind_;
  std::int64_t bytes_ = 0;
  std::atomic<std::int64_t> most_bytes_ = 0;
};

}  // namespace pd2
