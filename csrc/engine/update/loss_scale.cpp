#include "engine/update/loss_scale.h"

#include <cmath>
#include <iterator>

namespace pd2 {

LossScale::LossScale(const LossScaleOptions& options, std::int64_t version)
    : options_(options),
      changes_{{version, static_cast<float>(options.init_scale)}},
      newest_(version) {}

float LossScale::of_version(std::int64_t version) const {
  const std::lock_guard lock(mutex_);
  const auto after = changes_.upper_bound(version);
  return (after == changes_.begin() ? after : std::prev(after))->second;
}

void LossScale::decide(bool overflow) {
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

std::int64_t LossScale::growth_tracker() const {
  const std::lock_guard lock(mutex_);
  return growth_tracker_;
}

void LossScale::set(std::int64_t version, float scale, std::int64_t growth_tracker) {
  const std::lock_guard lock(mutex_);
  changes_.erase(changes_.lower_bound(version), changes_.end());
  changes_.emplace(version, scale);
  newest_ = version;
  growth_tracker_ = growth_tracker;
}

}  // namespace pd2
