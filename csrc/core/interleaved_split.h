// Layers -> stages where each rank has several: stage s is on rank s mod p.

#pragma once

#include "core/stage_split.h"

#include <optional>

namespace pd2 {

struct InterleavedSplit {
  StageSplit split;    // slowest: seconds per microbatch of the slowest rank, over all its stages
  bool exact = false;  // no split has a faster slowest rank
};

// A split of problem.stages' v p stages that makes the slowest of p = num_ranks ranks fast: a rank
// takes the sum of its stages' seconds and bytes. The stages of a rank must have one limit, the
// rank's. A value between two stages of one rank is counted as a message.
//
// No exact method in polynomial time is known to us: the split with the fastest slowest stage, of
// those whose ranks fit the memory, is improved by moving one or two cuts as long as a
// rank's memory or the slowest rank gets less. Never worse than that split. Then all splits that
// could be better are tried, as far as a fixed number of steps goes; `exact` where that came to its
// end: always up to about 12 layers. nullopt: nothing was found that fits; certain where all splits
// could be tried. Throws as split_stages(), and for a number of ranks that does not divide the
// stages'.
std::optional<InterleavedSplit> split_interleaved(const StageSplitProblem& problem, int num_ranks);

}  // namespace pd2
