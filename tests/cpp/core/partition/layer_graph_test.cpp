#include "core/partition/layer_graph.h"

#include "raises.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <random>

namespace pd2 {
namespace {

using testing::value_error;

LayerGraph chain(int num_layers) {
  LayerGraph graph;
  for (int i = 0; i < num_layers; ++i)
    graph.layers.push_back({"layer" + std::to_string(i), 1, 2, 4});
  return graph;
}

TEST(LayerGraph, AChainCutsOneEdge) {
  LayerGraph graph = chain(3);
  graph.edges = {{0, 1, 10}, {1, 2, 20}};
  EXPECT_EQ(cut_bytes(graph), (std::vector<std::int64_t>{10, 20}));
}

TEST(LayerGraph, AValueWithSeveralConsumersCrossesOnce) {
  LayerGraph graph = chain(5);
  graph.edges = {{0, 1, 10}, {0, 3, 10}, {0, 4, 10}, {1, 2, 7}, {2, 3, 5}, {3, 4, 3}};
  EXPECT_EQ(cut_bytes(graph), (std::vector<std::int64_t>{10, 17, 15, 13}));
}

TEST(LayerGraph, FewerThanTwoLayersHaveNoCut) {
  EXPECT_TRUE(cut_bytes({}).empty());
  EXPECT_TRUE(cut_bytes(chain(1)).empty());
}

TEST(LayerGraph, CutBytesEqualTheSumOverValuesThatCross) {
  std::mt19937 random(1);
  const auto below = [&](int n) { return static_cast<int>(random() % n); };
  for (int round = 0; round < 500; ++round) {
    const int n = 2 + below(8);
    LayerGraph graph = chain(n);
    for (int i = below(20); i > 0; --i) {
      const int producer = below(n - 1);
      graph.edges.push_back({producer, producer + 1 + below(n - 1 - producer), below(100)});
    }
    std::vector<std::int64_t> expected(n - 1);
    for (int cut = 0; cut < n - 1; ++cut) {
      std::map<int, std::int64_t> crossing;
      for (const Edge& edge : graph.edges) {
        if (edge.producer > cut || edge.consumer <= cut) continue;
        crossing[edge.producer] = std::max(crossing[edge.producer], edge.bytes);
      }
      for (const auto& [producer, bytes] : crossing) expected[cut] += bytes;
    }
    ASSERT_EQ(cut_bytes(graph), expected) << "round " << round;
  }
}

TEST(LayerGraph, BadGraphsNameTheRuleAndTheValues) {
  const auto error_with_edge = [](Edge edge) {
    LayerGraph graph = chain(3);
    graph.edges = {{0, 1, 1}, edge};
    EXPECT_EQ(value_error([&] { check(graph); }), value_error([&] { cut_bytes(graph); }));
    return value_error([&] { check(graph); });
  };
  EXPECT_EQ(error_with_edge({1, 3, 8}),
            "edge 1 (1 -> 3): layer: 3, layers: 3: an edge joins two layers that exist");
  EXPECT_EQ(error_with_edge({-1, 2, 8}),
            "edge 1 (-1 -> 2): layer: -1, layers: 3: an edge joins two layers that exist");
  EXPECT_EQ(error_with_edge({2, 1, 8}),
            "edge 1: producer: 2, consumer: 1: a producer must come before its consumer");
  EXPECT_EQ(error_with_edge({1, 1, 8}),
            "edge 1: producer: 1, consumer: 1: a producer must come before its consumer");
  EXPECT_EQ(error_with_edge({0, 2, -8}), "edge 1 (0 -> 2): bytes: -8: bytes must be >= 0");

  const auto error_with_layer = [](Layer layer) {
    LayerGraph graph = chain(1);
    graph.layers.push_back(layer);
    return value_error([&] { check(graph); });
  };
  EXPECT_EQ(error_with_layer({"fc", -1, 0, 0}),
            "layer 1 (fc): forward: -1: a cost must be finite and >= 0");
  EXPECT_EQ(error_with_layer({"fc", 0, std::numeric_limits<double>::infinity(), 0}),
            "layer 1 (fc): backward: inf: a cost must be finite and >= 0");
  EXPECT_EQ(error_with_layer({"fc", std::numeric_limits<double>::quiet_NaN(), 0, 0}),
            "layer 1 (fc): forward: nan: a cost must be finite and >= 0");
  EXPECT_EQ(error_with_layer({"fc", 0, 0, -4}),
            "layer 1 (fc): parameter_bytes: -4: bytes must be >= 0");
}

}  // namespace
}  // namespace pd2
