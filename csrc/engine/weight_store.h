// Which weight versions exist, who reads them, and which buffer the next one may be written to.
#pragma once

#include <cstdint>
#include <vector>

namespace pd2 {

// The ring of weight versions of one stage: version v lives in slot v mod K (DESIGN: 2bw K = 2,
// synchronous schedules K = 1). A version is immutable from the moment it is published until its
// last reader has unpinned it; writing over a pinned version throws.
//
//   newest = 4, K = 2:   slot 0: W(4)      slot 1: W(3), dead once batch 4's last backward is done
//
// Holds no memory itself. Not thread-safe: the stage's executor thread calls it, other threads only
// while the executor is drained.
class WeightStore {
 public:
  explicit WeightStore(int num_slots);

  int num_slots() const { return static_cast<int>(pins_.size()); }
  std::int64_t newest() const { return newest_; }
  int slot(std::int64_t version) const { return static_cast<int>(version % num_slots()); }

  // The version that the microbatches of batch t use: v(t) = max(t - delay, base), where base is
  // the version that was newest when all slots were last made equal (0, or the last `reset`).
  std::int64_t version_of_batch(std::int64_t batch, int delay) const;

  // A reader of `version` begins or ends. Throws if the version does not exist (any more).
  void pin(std::int64_t version);
  void unpin(std::int64_t version);

  // The slot for version newest() + 1. Throws if a reader still holds what is there. With one slot
  // the result is the newest version's own slot: the step happens in place.
  int slot_to_write() const;
  // newest() + 1 is complete and can be read.
  void publish();

  // Every slot now holds a copy of the newest version: delay starts anew (after loading weights).
  void reset();

  // The most versions that were alive (newest, or pinned) at any time.
  int most_live_versions() const { return most_live_versions_; }

 private:
  void count_live_versions();

  std::vector<int> pins_;               // readers, by slot
  std::vector<std::int64_t> versions_;  // what each slot holds
  std::int64_t newest_ = 0;
  std::int64_t base_ = 0;
  int most_live_versions_ = 1;
};

}  // namespace pd2
