// Layers -> stages: contiguous cuts that make the slowest stage as fast as possible, within memory.
//
// The cuts are those of the given execution order. A graph with branches has other orders, some
// with cheaper cuts, but the runtime executes the order that was captured: a cut costs what the
// edges that cross it in that order carry.

#pragma once

#include "core/infinity.h"

#include <array>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace pd2 {

// The costs of one layer and one microbatch, in seconds and bytes.
struct LayerCost {
  double forward = 0;
  double input_grad = 0;  // a B takes input_grad + weight_grad
  double weight_grad = 0;
  double activation_bytes = 0;  // kept from F to the end of B
  double parameter_bytes = 0;   // of one weight version, trained or not
  double trained_bytes = 0;     // the part of parameter_bytes that is trained
};

inline constexpr std::array<std::pair<const char*, double LayerCost::*>, 6> kLayerCosts = {{
    {"forward", &LayerCost::forward},
    {"input_grad", &LayerCost::input_grad},
    {"weight_grad", &LayerCost::weight_grad},
    {"activation_bytes", &LayerCost::activation_bytes},
    {"parameter_bytes", &LayerCost::parameter_bytes},
    {"trained_bytes", &LayerCost::trained_bytes},
}};

// The consumer reads what the producer made. Edges of one producer carry the same value.
struct Edge {
  int producer = 0;
  int consumer = 0;
  std::int64_t bytes = 0;
};

// A value that one layer makes and later ones read, whose message has a cost of its own: one
// without a gradient, say. Or a tensor that several layers keep for their backward, or a parameter
// that several use: it counts with the first of them (the producer here), and again on every later
// stage that has one of the others.
struct Value {
  int producer = 0;
  std::vector<int> consumers;
  double bytes = 0;
  double seconds = 0;  // paid by a stage that it leaves and by each stage that it enters
  double kept_bytes = 0;
  double trained_bytes = 0;
  double frozen_bytes = 0;
};

inline constexpr std::array<std::pair<const char*, double Value::*>, 5> kValueCosts = {{
    {"bytes", &Value::bytes},
    {"seconds", &Value::seconds},
    {"kept_bytes", &Value::kept_bytes},
    {"trained_bytes", &Value::trained_bytes},
    {"frozen_bytes", &Value::frozen_bytes},
}};

// The memory of the k-th stage: factors on sums over its layers. They come from the schedule (1f1b
// and 2bw keep min(d - k, m) microbatches), the optimizer and recompute.
struct StageMemoryRule {
  double trained = 0;      // times trained_bytes: versions, gradient, optimizer state
  double frozen = 1;       // times parameter_bytes - trained_bytes
  double activations = 0;  // times activation_bytes: microbatches in flight; with recompute 1
  double inputs = 0;       // times the bytes of the values that enter the stage: with recompute the
                           // microbatches in flight, else 0
  double limit = kInfinity;  // bytes
  double slowness = 1;       // multiplies the compute seconds: the stage's type of device

  // Of a stage with this sum of its layers, `inputs` apart.
  double bytes(const LayerCost& sum) const {
    return trained * sum.trained_bytes + frozen * (sum.parameter_bytes - sum.trained_bytes) +
           activations * sum.activation_bytes;
  }
};

// A value that enters a stage is paid for by that stage once, and one that leaves it is paid for
// once however many stages read it; one that only passes over it costs it nothing, since the
// runtime sends values from the stage that makes them to those that read them.
struct StageSplitProblem {
  std::vector<LayerCost> layers;
  std::vector<Edge> edges;    // of one producer: the same value, which takes the largest size that
                              // the edges concerned state
  std::vector<Value> values;  // further values
  std::vector<bool> can_cut;  // layers - 1: may a stage end after layer i; empty: everywhere
  std::vector<StageMemoryRule> stages;  // one per stage
  // The cost of a message of `edges`. A stage pays 2 (bytes * seconds_per_byte + seconds_per_value)
  // for each value that enters or leaves: the forward's message and the gradient's.
  double seconds_per_byte = 0;
  double seconds_per_value = 0;
  bool recompute = false;  // every stage runs its forward once more
};

struct StageSplit {
  std::vector<int> first_layers;  // of each stage, increasing, the first is 0
  double slowest = 0;             // seconds per microbatch of the slowest stage
};

// The split whose slowest stage takes the least time of all that fit the memory; of these the one
// with the smallest sum of message costs, of these the one with the earliest cuts. A stage takes
// slowness * (forward [twice with recompute] + input_grad + weight_grad) + its messages. Exact, up
// to rounding the costs to 2^-60 of their sum (which makes equal sums compare equal). nullopt:
// nothing fits.
//
// Method: of stages that cost at most a limit, which rises until d of them cover the layers, the
// best rest from each position on, from the back. A second time with the result as the limit, for
// ties. Takes O(d P) steps for P stages whose compute is at most the limit: about 2 n^2 / d of
// them, n^2 / 2 where one layer is slower than all others together.
//
// The problem is not checked: there must be as many allowed cuts as stages - 1, producers come
// before their consumers, and amounts are finite and >= 0.
std::optional<StageSplit> split_stages(const StageSplitProblem& problem);

}  // namespace pd2
