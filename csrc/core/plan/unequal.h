// What a plan would gain if its stages could have different numbers of replicas.

#pragma once

#include "core/plan/problem.h"

#include <optional>
#include <vector>

namespace pd2 {

// Layers times devices of all that is tried: 15 ms for each size and way to recompute.
inline constexpr int kMostLayersTimesDevices = 8192;

struct UnequalReplication {
  std::vector<int> replicas;   // of each stage
  double seconds_per_row = 0;  // as Evaluation's score
};

// The fastest split by core/partition/replicated_split.h, with two versions of the weights, of all
// sizes of microbatches, with and without recompute of stages. Rather too slow than too fast:
// messages are not beside computation, and all-reduces take the slowest link between neighbouring
// devices.
//
// None: nothing is below `worth`; layers times devices are above kMostLayersTimesDevices, devices
// of several types, no schedule has two versions, or width or number of stages are given.
std::optional<UnequalReplication> unequal_replication(const PlanProblem& problem, double worth);

}  // namespace pd2
