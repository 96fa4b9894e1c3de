// Copies of a stage's versions, made beside its next updates.
#pragma once

#include "engine/streams.h"
#include "engine/update/background.h"

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace pd2 {

// For checkpoints. A copy is made in a thread of its own once its version has been made. The
// executor's thread calls all but made(), which may come from the updates' thread, too.
class VersionCopies {
 public:
  // `begin_thread` is called first in the copies' thread. `newest`: the version that there is.
  VersionCopies(const StageStreams& streams, std::function<void()> begin_thread,
                std::int64_t newest)
      : streams_(streams), begin_thread_(std::move(begin_thread)), made_(newest) {}

  // Calls `copy` once `version` has been made, at once if it has; then after the copies before, for
  // which it waits by `wait`.
  void copy_after(std::int64_t version, std::function<void()> copy,
                  const std::function<void(Background&)>& wait);
  // A version has been made, as soon as the device has done all of these: begins its copies. The
  // fences are the calling thread's: what the executor's thread gives `compute` may be recorded as
  // a graph meanwhile, of which nobody else may have an event.
  void made(std::int64_t version, std::vector<Fence> after);
  // Versions after this one will not be made, or are others.
  void forget_after(std::int64_t version);
  // The versions get numbers that others had; none is waited for.
  void count_from(std::int64_t newest);

  // The copies' thread; null: there was nothing to copy.
  Background* thread() const { return thread_.get(); }
  void end() { thread_.reset(); }

 private:
  const StageStreams& streams_;
  const std::function<void()> begin_thread_;
  std::mutex mutex_;
  std::int64_t made_;                                           // the newest version
  std::multimap<std::int64_t, std::function<void()>> to_copy_;  // by version
  std::unique_ptr<Background> thread_;                          // made when first needed
};

}  // namespace pd2
