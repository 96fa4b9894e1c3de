// Sums over the layers of a profiled model, which the planner asks for again and again.

#pragma once

#include "planner/partition/split_costs.h"
#include "planner/plan/problem.h"

#include <vector>

namespace pd2 {

// For one size of microbatch.
struct LayerSums {
  std::vector<LayerCost> before;      // of the layers before each one, and of all
  std::vector<Edge> edges;            // that a cut may cross, by producer and consumer
  std::vector<LayerCost> blocks;      // of each of the model's blocks
  std::vector<double> block_inputs;   // bytes that each block reads
  double seconds_per_saved_byte = 0;  // of the block that saves bytes at the least price
  double least_received = 0;          // least_received()

  LayerCost of(int first, int end) const;
  const LayerCost& of_all() const { return before.back(); }
};

LayerSums sums_of(const ProfiledModel& model, int size);

struct StageMessage {
  int from = 0;  // stages
  int to = 0;
  double bytes = 0;
};

// The messages between every two stages, each value once, sorted by sender and receiver.
std::vector<StageMessage> messages_between(const LayerSums& sums, const std::vector<int>& stage_of);

// Bytes that cross the cut between layer i and layer i + 1, for i in 0 .. layers - 2. A value with
// several consumers beyond the cut counts once, with the largest size any of those edges states.
std::vector<std::int64_t> cut_bytes(std::vector<Edge> edges, int num_layers);

// The bytes that every stage shares with an earlier one.
std::vector<Received> shared_bytes(const std::vector<Value>& values,
                                   const std::vector<int>& stage_of, int num_stages);

}  // namespace pd2
