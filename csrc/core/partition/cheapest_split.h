// Finds the split whose messages cost the least, of all whose stages are allowed.

#pragma once

#include "core/partition/stage_rows.h"

#include <vector>

namespace pd2 {

// The first piece of each stage of the split with the smallest sum of message costs, of several the
// one with the earliest cuts, among those whose stages all have their bit in `rows` and fit the
// memory. There has to be one. `from` is coverable()'s.
std::vector<int> cheapest_split(const SplitCosts& costs, const StageRows& rows,
                                const std::vector<Positions>& from);

}  // namespace pd2
