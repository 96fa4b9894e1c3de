// A run in which hosts launch what devices do: each rank's host gives actions to streams, and
// updates have a thread of their own that reads norms from the device.

#pragma once

#include "planner/simulate/simulate.h"

#include <vector>

namespace pd2 {

struct LaunchedRun {
  std::vector<std::vector<SimulatedAction>> timeline;  // per rank, in order of their starts
  std::vector<IdleTime> idle;  // per rank, in the actions of batches first + 1 .. last
};

// As simulate() says. The schedule and the costs have been checked.
LaunchedRun run_launched(const Schedule& schedule, const Costs& costs, const LaunchCosts& launches,
                         int num_batches, int first, int last);

}  // namespace pd2
