#include "core/partition/layer_graph.h"

#include "core/check.h"

#include <algorithm>
#include <cmath>

namespace pd2 {
namespace {

void check_cost(double cost, const char* what, std::size_t index, const std::string& name) {
  PD2_CHECK(std::isfinite(cost) && cost >= 0, "layer ", index, " (", name, "): ", what, ": ", cost,
            ": a cost must be finite and >= 0");
}

}  // namespace

void check(const LayerGraph& graph) {
  for (std::size_t i = 0; i < graph.layers.size(); ++i) {
    const Layer& layer = graph.layers[i];
    check_cost(layer.forward, "forward", i, layer.name);
    check_cost(layer.backward, "backward", i, layer.name);
    PD2_CHECK(layer.parameter_bytes >= 0, "layer ", i, " (", layer.name,
              "): parameter_bytes: ", layer.parameter_bytes, ": bytes must be >= 0");
  }
  check_edges(graph.edges, static_cast<int>(graph.layers.size()));
}

void check_edges(const std::vector<Edge>& edges, int num_layers) {
  for (std::size_t i = 0; i < edges.size(); ++i) {
    const Edge& edge = edges[i];
    for (const int layer : {edge.producer, edge.consumer}) {
      PD2_CHECK(layer >= 0 && layer < num_layers, "edge ", i, " (", edge.producer, " -> ",
                edge.consumer, "): layer: ", layer, ", layers: ", num_layers,
                ": an edge joins two layers that exist");
    }
    PD2_CHECK(edge.producer < edge.consumer, "edge ", i, ": producer: ", edge.producer,
              ", consumer: ", edge.consumer, ": a producer must come before its consumer");
    PD2_CHECK(edge.bytes >= 0, "edge ", i, " (", edge.producer, " -> ", edge.consumer,
              "): bytes: ", edge.bytes, ": bytes must be >= 0");
  }
}

std::vector<std::int64_t> cut_bytes(const LayerGraph& graph) {
  check(graph);
  if (graph.layers.empty()) return {};

  // Per producer from its farthest consumer to its nearest: at each cut the value counts with the
  // largest size among the edges that still cross.
  std::vector<Edge> edges = graph.edges;
  std::sort(edges.begin(), edges.end(), [](const Edge& a, const Edge& b) {
    return a.producer != b.producer ? a.producer < b.producer : a.consumer > b.consumer;
  });
  std::vector<std::int64_t> change(graph.layers.size(), 0);  // bytes at cut i minus at cut i - 1
  for (std::size_t i = 0; i < edges.size();) {
    const int producer = edges[i].producer;
    std::int64_t bytes = 0;
    for (; i < edges.size() && edges[i].producer == producer; ++i) {
      // The edge crosses the cuts producer .. consumer - 1, and adds what exceeds the farther ones.
      const std::int64_t more = std::max<std::int64_t>(0, edges[i].bytes - bytes);
      change[producer] += more;
      change[edges[i].consumer] -= more;
      bytes += more;
    }
  }
  std::vector<std::int64_t> crossing(graph.layers.size() - 1);
  std::int64_t bytes = 0;
  for (std::size_t cut = 0; cut < crossing.size(); ++cut) crossing[cut] = bytes += change[cut];
  return crossing;
}

}  // namespace pd2
