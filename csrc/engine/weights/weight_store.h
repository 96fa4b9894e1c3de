// Which weight versions exist, who reads them, and which buffer the next one may be written to.
#pragma once

#include "core/check.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace pd2 {

// The ring of weight versions of one stage: version v lives in slot v mod S. A version is immutable
// from the moment it is published until its last reader has unpinned it; writing over a pinned
// version throws.
//
// A schedule reads K versions (2bw 2, synchronous ones 1). With S = K the next version is written
// over the oldest one; with S > K over the batch's gradients, which are added up where it will be.
// The oldest one's slot is free for the next batch's then:
//
//   newest = 4, S = 2:   slot 0: W(4)        slot 1: W(3), dead after batch 4's last backward
//   newest = 4, S = 3:   slot 1: W(4)        slot 0: W(3), dead too, then batch 5's gradients
//                        slot 2: batch 4's gradients, then W(5)
//
// Holds no memory itself. Not thread-safe: the stage's executor thread calls it, other threads only
// while the executor is drained.
class WeightStore {
 public:
  // Version `newest` exists, no other.
  explicit WeightStore(int num_slots, std::int64_t newest = 0) : newest_(newest), base_(newest) {
    PD2_CHECK(num_slots >= 1, "a weight store needs at least 1 slot, got ", num_slots);
    pins_.assign(num_slots, 0);
    versions_.assign(num_slots, -1);
    versions_[slot(newest)] = newest;
  }

  int num_slots() const { return static_cast<int>(pins_.size()); }
  std::int64_t newest() const { return newest_; }
  int slot(std::int64_t version) const { return static_cast<int>(version % num_slots()); }

  // The version that the microbatches of batch t use: v(t) = max(t - delay, base), where base is
  // the version that was newest when all slots were last made equal (0, or the last `reset`).
  std::int64_t version_of_batch(std::int64_t batch, int delay) const {
    return std::max(batch - delay, base_);
  }

  // A reader of `version` begins or ends. Throws if the version does not exist (any more).
  void pin(std::int64_t version) {
    const int s = version < 0 ? 0 : slot(version);
    PD2_CHECK(version >= 0 && versions_[s] == version, "version ", version,
              " cannot be read: its slot holds version ", versions_[s], ", the newest is ",
              newest_);
    ++pins_[s];
    count_live_versions();
  }
  void unpin(std::int64_t version) {
    PD2_CHECK(pins_[slot(version)] > 0 && versions_[slot(version)] == version, "version ", version,
              " is unpinned but nobody reads it; its slot holds version ", versions_[slot(version)],
              " with ", pins_[slot(version)], " readers");
    --pins_[slot(version)];
  }

  // The slot for `version`, which is yet to be made. Throws if a reader still holds its content.
  // With one slot the result is the newest version's own slot: the step happens in place.
  int slot_to_write(std::int64_t version) const {
    const int s = slot(version);
    PD2_CHECK(pins_[s] == 0, "version ", version, " may not overwrite version ", versions_[s], ": ",
              pins_[s], " microbatches in flight still read it");
    return s;
  }
  // newest() + 1 is about to be written to its slot, which is returned.
  int begin_next() {
    const int s = slot_to_write(newest_ + 1);
    writing_next_ = true;
    count_live_versions();
    return s;
  }
  // Instead of publish(): newest() + 1 will be begun again.
  void drop_next() { writing_next_ = false; }
  // newest() + 1 is complete and can be read.
  void publish() {
    const int s = slot_to_write(newest_ + 1);
    writing_next_ = false;
    ++newest_;
    versions_[s] = newest_;
    count_live_versions();
  }

  // The newest version's content was replaced (weights were loaded): the delay restarts.
  void reset() {
    for (int pins : pins_) {
      PD2_CHECK(pins == 0, "weights may be replaced only when nobody reads them: ", pins,
                " microbatches in flight");
    }
    base_ = newest_;
  }

  // The versions `oldest` .. `newest` are in their slots, and no other: batch t uses v(t) =
  // max(t - delay, oldest) from now on.
  void load(std::int64_t oldest, std::int64_t newest) {
    PD2_CHECK(0 <= oldest && oldest <= newest && newest - oldest < num_slots(), "versions ", oldest,
              " to ", newest, " are to be loaded: ", num_slots(), " slots hold so many at most");
    reset();
    versions_.assign(num_slots(), -1);
    for (std::int64_t version = oldest; version <= newest; ++version) {
      versions_[slot(version)] = version;
    }
    newest_ = newest;
    base_ = oldest;
  }

  // The most versions that were alive (newest, pinned, or being written) at any time.
  int most_live_versions() const { return most_live_versions_; }

 private:
  void count_live_versions() {
    int live = 0;
    for (int s = 0; s < num_slots(); ++s) {
      const bool is_written = writing_next_ && s == slot(newest_ + 1);
      live += (pins_[s] > 0 || versions_[s] == newest_ || is_written) ? 1 : 0;
    }
    most_live_versions_ = std::max(most_live_versions_, live);
  }

  std::vector<int> pins_;               // readers, by slot
  std::vector<std::int64_t> versions_;  // what each slot holds
  std::int64_t newest_ = 0;
  std::int64_t base_ = 0;
  bool writing_next_ = false;
  int most_live_versions_ = 1;
};

}  // namespace pd2
