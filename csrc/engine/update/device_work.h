// What a stage's device has been given and has done, and what its weights are worth if it cannot.
#pragma once

#include "engine/streams.h"

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <utility>

namespace pd2 {

// Thread-safe. is_done() alone asks the device, and may have to wait until that is idle: while a
// kernel is loaded, or memory freed.
class DeviceWork {
 public:
  explicit DeviceWork(const StageStreams& streams)
      : compute_(streams.compute), update_(streams.update) {}

  void begin_update() {
    const std::lock_guard lock(mutex_);
    is_under_way_ = true;
    ++num_updates_;
  }
  // Instead of end_update(): it changes nothing.
  void drop_update() {
    const std::lock_guard lock(mutex_);
    is_under_way_ = false;
    --num_updates_;
  }
  // The stream has been given all of it. Of a device that has failed whoever reads from it learns.
  void end_update(const MaybeStream& stream) noexcept {
    Fence given;
    try {
      given = Fence::of(stream);
    } catch (const std::exception&) {
    }
    const std::lock_guard lock(mutex_);
    is_under_way_ = false;
    updated_ = std::move(given);
  }

  // Whether it has done everything. Counts updates that it has done.
  bool is_done() {
    std::unique_lock lock(mutex_);
    const Fence updated = updated_;
    const std::int64_t number = num_updates_;
    const bool is_under_way = is_under_way_;
    lock.unlock();
    if (is_under_way || !updated.is_done()) {
      return false;
    }
    num_done_ = number;
    return Fence::of(compute_).is_done() && Fence::of(update_).is_done();
  }
  std::int64_t num_done() const { return num_done_; }
  // So many first updates were made of what there should be.
  void confirm(std::int64_t number) {
    const std::lock_guard lock(mutex_);
    num_right_ = number;
  }
  // From now on the device goes on without what it waited for.
  void cut_off() { is_cut_off_ = true; }
  bool is_cut_off() const { return is_cut_off_; }
  // Whether the weights mean nothing: an update had begun that was not confirmed.
  bool is_spoilt() const {
    const std::lock_guard lock(mutex_);
    return is_cut_off_ && num_right_ != num_updates_;
  }

 private:
  const MaybeStream compute_, update_;
  mutable std::mutex mutex_;
  bool is_under_way_ = false;
  std::int64_t num_updates_ = 0, num_right_ = 0;
  Fence updated_;
  std::atomic<std::int64_t> num_done_ = 0;
  std::atomic<bool> is_cut_off_ = false;
};

}  // namespace pd2
