// Dynamic loss scaling by torch.amp.GradScaler's rule, where a scale belongs to a weight version.
#pragma once

#include <cstdint>
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
  LossScale(const LossScaleOptions& options, std::int64_t version);

  float of_version(std::int64_t version) const;
  // Decides the scale of the next version.
  void decide(bool overflow);
  // Updates without overflow since the scale last changed.
  std::int64_t growth_tracker() const;
  // Goes on from `version`, the newest there is, as if with this scale and tracker.
  void set(std::int64_t version, float scale, std::int64_t growth_tracker);

 private:
  const LossScaleOptions options_;
  mutable std::mutex mutex_;
  std::map<std::int64_t, float> changes_;  // by the first version that has it
  std::int64_t newest_;                    // that has been decided
  std::int64_t growth_tracker_ = 0;
};

}  // namespace pd2
