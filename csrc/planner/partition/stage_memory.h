// Which stages fit the memory.

#pragma once

#include "planner/partition/split_costs.h"

#include <vector>

namespace pd2 {

// Memory alone. Of a given first piece a stage's bytes never shrink with its end, since values that
// have entered stay; of a given end they may grow with the first piece, since fewer values enter a
// longer stage.
struct MemoryFit {
  // [k][a]: the farthest end of stage k that begins at piece a; a itself if none fits.
  std::vector<std::vector<int>> farthest;
  // [k][a]: may stage k begin at a, so that it and the stages after it fit. k = num_stages: only
  // after the last piece.
  std::vector<std::vector<char>> may_begin;
  // The smallest bytes above its limit of any stage whose end is one past the farthest.
  double next_bytes = 0;

  bool fits() const { return may_begin[0][0]; }
};

// limits: bytes by stage.
MemoryFit fit_memory(const SplitCosts& costs, const std::vector<double>& limits);

}  // namespace pd2
