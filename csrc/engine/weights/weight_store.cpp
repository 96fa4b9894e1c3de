#include "engine/weights/weight_store.h"

#include "core/check.h"

#include <algorithm>

namespace pd2 {

WeightStore::WeightStore(int num_slots, std::int64_t newest) : newest_(newest), base_(newest) {
  PD2_CHECK(num_slots >= 1, "a weight store needs at least 1 slot, got ", num_slots);
  pins_.assign(num_slots, 0);
  versions_.assign(num_slots, -1);
  versions_[slot(newest)] = newest;
}

std::int64_t WeightStore::version_of_batch(std::int64_t batch, int delay) const {
  return std::max(batch - delay, base_);
}

void WeightStore::pin(std::int64_t version) {
  const int s = version < 0 ? 0 : slot(version);
  PD2_CHECK(version >= 0 && versions_[s] == version, "version ", version,
            " cannot be read: its slot holds version ", versions_[s], ", the newest is ", newest_);
  ++pins_[s];
  count_live_versions();
}

void WeightStore::unpin(std::int64_t version) {
  PD2_CHECK(pins_[slot(version)] > 0 && versions_[slot(version)] == version, "version ", version,
            " is unpinned but nobody reads it; its slot holds version ", versions_[slot(version)],
            " with ", pins_[slot(version)], " readers");
  --pins_[slot(version)];
}

int WeightStore::slot_to_write(std::int64_t version) const {
  const int s = slot(version);
  PD2_CHECK(pins_[s] == 0, "version ", version, " may not overwrite version ", versions_[s], ": ",
            pins_[s], " microbatches in flight still read it");
  return s;
}

int WeightStore::begin_next() {
  const int s = slot_to_write(newest_ + 1);
  writing_next_ = true;
  count_live_versions();
  return s;
}

void WeightStore::publish() {
  const int s = slot_to_write(newest_ + 1);
  writing_next_ = false;
  ++newest_;
  versions_[s] = newest_;
  count_live_versions();
}

void WeightStore::reset() {
  for (int pins : pins_) {
    PD2_CHECK(pins == 0, "weights may be replaced only when nobody reads them: ", pins,
              " microbatches in flight");
  }
  base_ = newest_;
}

void WeightStore::count_live_versions() {
  int live = 0;
  for (int s = 0; s < num_slots(); ++s) {
    const bool is_written = writing_next_ && s == slot(newest_ + 1);
    live += (pins_[s] > 0 || versions_[s] == newest_ || is_written) ? 1 : 0;
  }
  most_live_versions_ = std::max(most_live_versions_, live);
}

}  // namespace pd2
