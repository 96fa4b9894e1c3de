// Layers -> stages.

#pragma once

#include <span>
#include <vector>

namespace pd2 {

// Cuts n layers into num_stages contiguous, non-empty stages such that the slowest stage is as fast
// as possible: a stage costs the sum of its layers' costs, plus the cost of the cut before it and
// of the cut after it. Ties: the smallest total cut cost, then the earliest cuts. Exact, up to
// rounding the costs to 2^-61 of their sum (which makes equal sums compare equal).
//
//   costs      n costs in any unit, e.g. forward + backward seconds of one microbatch
//   cut_costs  n - 1, same unit: entry i is paid by both neighbours of a cut between layers i, i+1;
//              empty: zero
//   can_cut    n - 1: may a stage end after layer i; empty: everywhere
//
// Returns the index of each stage's first layer: num_stages increasing numbers, the first is 0.
// Takes O(n d (64 + log n)) time. Throws ValueError for num_stages < 1 or > n, fewer allowed cuts
// than num_stages - 1, sizes that don't fit, costs that are negative or not finite.
std::vector<int> partition(std::span<const double> costs, std::span<const double> cut_costs,
                           int num_stages, const std::vector<bool>& can_cut);

}  // namespace pd2
