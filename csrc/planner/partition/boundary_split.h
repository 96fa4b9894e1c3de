// Layers -> stages where the links between stages differ.

#pragma once

#include <functional>
#include <vector>

namespace pd2 {

// A model of pieces that are not cut: stages are made of whole ones.
struct BoundarySplitProblem {
  std::vector<double> seconds_before;  // of the pieces before each position, and of all
  std::vector<double> bytes;           // of the message, by position
  std::vector<double> slowness;        // by stage: multiplies its pieces' seconds
  std::vector<double> latency;         // of the link behind each stage but the last
  std::vector<double> seconds_per_byte;
  int step = 1;  // 2bw_eager: 2
  // Whether stage k may be the pieces first .. end - 1; true for what is within such a stage.
  std::function<bool(int k, int first, int end)> fits;
};

// Splits that are good by different measures, as the positions that stages begin at; each of them
// once, none if nothing fits. With s a stage's seconds and c a message's:
//
//   the fastest slowest cycle, a microbatch from stage i to j and back, or slowest link
//               max over i <= j of (sum of s over i .. j + 2 sum of c between) / (step (j - i) + 1)
//   the smallest sum of c of those with no stage or link slower than 1, 1.03, ... 2 times what can
//               be reached
//
// The limits are found within a thousandth. Each is a dynamic program over stages and the positions
// that they end at: of the cycles that end there, the one that exceeds the limit the least can
// be continued the furthest.
std::vector<std::vector<int>> split_by_boundaries(const BoundarySplitProblem& problem);

}  // namespace pd2
