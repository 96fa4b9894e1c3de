// The steady state of a V in closed form.

#pragma once

#include "planner/plan/pipeline_shape.h"
#include "planner/simulate/simulate.h"

namespace pd2 {

// Seconds that the ranks of a V take for each further microbatch while nothing drains. All repeat
// their periods, so each action waits for others of the same microbatch or of one that is a fixed
// number behind: this is the most seconds by microbatch around any circle of such waits. A link
// that is busy all the time is not counted.
double seconds_per_microbatch_of_v(const PipelineShape& shape, const Costs& costs);

}  // namespace pd2
