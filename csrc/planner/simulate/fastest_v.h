// The V-shaped schedule that is fastest with given costs, of those that fit into memory.

#pragma once

#include "core/schedule/schedule.h"
#include "planner/simulate/simulate.h"

#include <cstddef>
#include <vector>

namespace pd2 {

// Of some periods, at least one: the first within a thousandth of the shortest.
std::size_t first_of_fastest(const std::vector<double>& periods);

// Simulates every V of `ranks` ranks with two weight versions (see v_shape.h) whose ranks each hold
// activations of at most `in_flight` microbatches, counting a stage's for half of one, and gives
// the one with the shortest period. Of those that are within a thousandth of it the one that holds
// the fewest. Its name is "2bw_v_" with its four steps.
//
// Throws ValueError where there is none: more of `in_flight`, or of `num_microbatches`, is needed.
Schedule fastest_v_schedule(int ranks, int num_microbatches, double in_flight, const Costs& costs);

}  // namespace pd2
