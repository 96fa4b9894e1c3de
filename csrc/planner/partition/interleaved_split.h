// Layers -> stages where each rank has several: stage s is on rank s mod p.

#pragma once

#include "planner/partition/stage_split.h"

#include <optional>

namespace pd2 {

struct InterleavedSplit {
  StageSplit split;    // slowest: seconds per microbatch of the slowest rank, over all its stages
  bool exact = false;  // no split has a faster slowest rank
};

// A split of problem.stages' v p stages that makes the slowest of p = num_ranks ranks fast: a rank
// takes the sum of its stages' seconds and bytes, of what runs again those of the largest alone.
// The stages of a rank must have one limit, the rank's. A value between two stages of one rank is
// counted as a message.
//
// No exact method in polynomial time is known to us. The split with the fastest slowest stage is
// improved by moving one or two cuts as long as a rank's excess of memory or the slowest rank gets
// less, so the result is never worse than that split; that alone finds the best one of four in five
// random models of up to 12 layers. Then all splits that may be better are gone through, as far as
// a fixed number of steps goes; `exact` where that came to its end, always up to 12 layers.
// nullopt: nothing was found that fits, which is certain where all splits could be gone through,
// too.
//
// Throws as split_stages(), and for a number of ranks that does not divide the stages'.
std::optional<InterleavedSplit> split_interleaved(const StageSplitProblem& problem, int num_ranks);

}  // namespace pd2
