// A model as the partitioner sees it: layers in execution order, with costs, and the values between
// them.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace pd2 {

struct Layer {
  std::string name;
  double forward = 0;   // seconds, or any cost unit, for one microbatch
  double backward = 0;  // the same unit
  std::int64_t parameter_bytes = 0;

  bool operator==(const Layer&) const = default;
};

// The consumer reads what the producer made. Edges of one producer carry the same value.
struct Edge {
  int producer = 0;
  int consumer = 0;
  std::int64_t bytes = 0;

  bool operator==(const Edge&) const = default;
};

struct LayerGraph {
  std::vector<Layer> layers;  // in execution order
  std::vector<Edge> edges;    // in any order, producer < consumer
};

// Throws ValueError for an edge to a layer that is not there, an edge whose producer doesn't come
// before its consumer, and costs or bytes that are negative or not finite.
void check(const LayerGraph& graph);

// check() for edges alone.
void check_edges(const std::vector<Edge>& edges, int num_layers);

// Bytes that cross the cut between layer i and layer i + 1, for i in 0 .. layers - 2. A value with
// several consumers beyond the cut counts once (with the largest size any of those edges states).
// Throws as check() does.
std::vector<std::int64_t> cut_bytes(const LayerGraph& graph);

}  // namespace pd2
