#include "planner/plan/sums.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

namespace pd2 {
namespace {

TEST(CutBytes, AChainCutsOneEdge) {
  EXPECT_EQ(cut_bytes({{0, 1, 10}, {1, 2, 20}}, 3), (std::vector<std::int64_t>{10, 20}));
}

TEST(CutBytes, AValueWithSeveralConsumersCrossesOnce) {
  const std::vector<Edge> edges = {{0, 1, 10}, {0, 3, 10}, {0, 4, 10},
                                   {1, 2, 7},  {2, 3, 5},  {3, 4, 3}};
  EXPECT_EQ(cut_bytes(edges, 5), (std::vector<std::int64_t>{10, 17, 15, 13}));
}

TEST(CutBytes, FewerThanTwoLayersHaveNoCut) {
  EXPECT_TRUE(cut_bytes({}, 0).empty());
  EXPECT_TRUE(cut_bytes({}, 1).empty());
}

TEST(CutBytes, CutBytesEqualTheSumOverValuesThatCross) {
  std::mt19937 random(1);
  const auto below = [&](int n) { return static_cast<int>(random() % n); };
  for (int round = 0; round < 500; ++round) {
    const int n = 2 + below(8);
    std::vector<Edge> edges;
    for (int i = below(20); i > 0; --i) {
      const int producer = below(n - 1);
      edges.push_back({producer, producer + 1 + below(n - 1 - producer), below(100)});
    }
    std::vector<std::int64_t> expected(n - 1);
    for (int cut = 0; cut < n - 1; ++cut) {
      std::map<int, std::int64_t> crossing;
      for (const Edge& edge : edges) {
        if (edge.producer > cut || edge.consumer <= cut) continue;
        crossing[edge.producer] = std::max(crossing[edge.producer], edge.bytes);
      }
      for (const auto& [producer, bytes] : crossing) expected[cut] += bytes;
    }
    ASSERT_EQ(cut_bytes(edges, n), expected) << "round " << round;
  }
}

}  // namespace
}  // namespace pd2
