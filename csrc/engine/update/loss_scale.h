// Dynamic loss scaling by torch.amp.GradScaler's rule, where a scale belongs to a weight version.
#pragma once

#include <cmath>
#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>

namespace pd2 {

struct LossScaleOptions {
  double init_scale = 65536.0;
  double growth_factor = 2.0;
  double backoff_factor = 0.5;
  std::int64_t growth_interval = 2000;
};

// Batch t's loss is multiplied by the scale of the version that its microbatches read, and update t
// decides the scale of version t + 1. So when a scale is used does not depend on when an update is
// executed, and draining changes no number.
//
// Shared by the stages of a process; every process decides the same from the same overflows. Any
// thread may read what has been decided.
class LossScale {
 public:
  // `version`: the newest there is.
  LossScale(const LossScaleOptions& options, std::int64_t version)
      : options_(options),
        changes_{{version, static_cast<float>(options.init_scale)}},
        newest_(version) {}

  float of_version(std::int64_t version) const {
    const std::lock_guard lock(mutex_);
    const auto after = changes_.upper_bound(version);
    return (after == changes_.begin() ? after : std::prev(after))->second;
  }
  // Decides the scale of the next version.
  void decide(bool overflow) {
    const std::lock_guard lock(mutex_);
    ++newest_;
    const float newest = changes_.rbegin()->second;
    float scale = newest;
    if (overflow) {
      growth_tracker_ = 0;
      scale = static_cast<float>(newest * options_.backoff_factor);
    } else if (++growth_tracker_ == options_.growth_interval) {
      growth_tracker_ = 0;
      const auto grown = static_cast<float>(newest * options_.growth_factor);
      scale = std::isfinite(grown) ? grown : newest;
    }
    if (scale != newest) {
      changes_.emplace(newest_, scale);
    }
  }
  // Updates without overflow since the scale last changed.
  std::int64_t growth_tracker() const {
    const std::lock_guard lock(mutex_);
    return growth_tracker_;
  }
  // Goes on from `version`, the newest there is, as if with this scale and tracker.
  void set(std::int64_t version, float scale, std::int64_t growth_tracker) {
    const std::lock_guard lock(mutex_);
    changes_.erase(changes_.lower_bound(version), changes_.end());
    changes_.emplace(version, scale);
    newest_ = version;
    growth_tracker_ = growth_tracker;
  }

 private:
  const LossScaleOptions options_;
  mutable std::mutex mutex_;
  std::map<std::int64_t, float> changes_;  // by the first version that has it
  std::int64_t newest_;                    // that has been decided
  std::int64_t growth_tracker_ = 0;
};

}  // namespace pd2
