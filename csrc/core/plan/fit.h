// Whether a candidate's stages may fit memory and time, before any split is computed.

#pragma once

#include "core/plan/candidates.h"
#include "core/plan/sums.h"

#include <vector>

namespace pd2 {

struct FitQuestion {
  const Candidate& candidate;
  const ProfiledModel& model;
  const LayerSums& sums;
  const std::vector<StageMemoryRule>& rules;  // by stage; limits are its share of its rank's
  const std::vector<double>& limits;          // bytes, by rank
  double least_slowness;                      // of all devices
};

// A sum of many terms, in another order than the limit's.
bool is_within(double bytes, double limit);

// False: every split of the candidate breaks a limit or takes `seconds` a batch or more. The
// furthest that stages reach, each one filled with `sharing` times its share of the memory and with
// as much work as leaves the batch below `seconds`, must be the last layer. Far cheaper than a
// split. Where batches drain, what comes before a stage on a microbatch's way there and back leaves
// it less time.
bool may_fit(const FitQuestion& question, int sharing, double seconds);

}  // namespace pd2
