// Cuts for pipelines in both directions and in a V, where rank r holds stages r and d - 1 - r.

#pragma once

#include "planner/partition/stage_split.h"

#include <optional>
#include <vector>

namespace pd2 {

// The first layers of d stages, d even, such that the rank with the most work of its two stages has
// little of it, and that each rank's bytes are at most the smaller of its stages' limits. A search
// by the limit on a rank's work: each rank in turn takes layers from the front and from the back of
// what is left, from where it has less of them, as long as both limits allow it; if nothing fits
// so, from the front first, or from the back. Not always the best split, but found in O(n log n),
// and where layers are small against stages even. Messages are left out. nullopt: nothing fits that
// is found in this way.
//
// Throws ValueError as split_stages().
std::optional<std::vector<int>> split_folded(const StageSplitProblem& problem);

}  // namespace pd2
