#include "core/infinity.h"
#include "made_splits.h"
#include "planner/partition/split_costs.h"
#include "sanitized.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <tuple>

namespace pd2 {
namespace {

using testing::AllStages;
using testing::for_each_split;
using testing::for_each_stage;
using testing::kSanitized;
using testing::random_problem;

struct Tried {
  std::optional<std::vector<int>> best;
  double slowest = 0;
  bool is_any = false;  // no: fewer cuts than stages
};

Tried try_all(const StageSplitProblem& problem) {
  const AllStages stages(problem);
  Tried tried;
  std::tuple<double, double, std::vector<int>> best;
  for_each_split(problem, [&](const std::vector<int>& firsts) {
    double slowest = 0;
    double messages = 0;
    bool fits = true;
    for_each_stage(problem, firsts, [&](int k, int a, int b) {
      slowest = std::max(slowest, stages.seconds(k, a, b));
      messages += stages.messages(a, b);
      fits = fits && stages.bytes(k, a, b) <= problem.stages[k].limit;
    });
    tried.is_any = true;
    const std::tuple candidate(slowest, messages, firsts);
    if (!fits || (tried.best && best <= candidate)) return;
    best = candidate;
    tried.best = firsts;
    tried.slowest = slowest;
  });
  return tried;
}

// The same by a plain DP over (stage, position), for problems with more splits than can be tried.
std::optional<std::vector<int>> best_by_dp(const StageSplitProblem& problem) {
  const int n = static_cast<int>(problem.layers.size());
  const int d = static_cast<int>(problem.stages.size());
  const AllStages stages(problem);
  const auto may = [&](int k, int a, int b) {
    return (b == n || problem.can_cut.empty() || problem.can_cut[b - 1]) &&
           stages.bytes(k, a, b) <= problem.stages[k].limit;
  };
  std::vector<std::vector<double>> slowest(d + 1, std::vector<double>(n + 1, kInfinity));
  slowest[d][n] = 0;
  for (int k = d - 1; k >= 0; --k) {
    for (int a = 0; a < n; ++a) {
      for (int b = a + 1; b <= n; ++b) {
        if (!may(k, a, b)) continue;
        slowest[k][a] =
            std::min(slowest[k][a], std::max(stages.seconds(k, a, b), slowest[k + 1][b]));
      }
    }
  }
  const double limit = slowest[0][0];
  if (limit == kInfinity) return std::nullopt;
  std::vector<std::vector<double>> messages(d + 1, std::vector<double>(n + 1, kInfinity));
  std::vector<std::vector<int>> end(d + 1, std::vector<int>(n + 1, 0));
  messages[d][n] = 0;
  for (int k = d - 1; k >= 0; --k) {
    for (int a = 0; a < n; ++a) {
      for (int b = a + 1; b <= n; ++b) {
        const double sum = stages.messages(a, b) + messages[k + 1][b];
        if (sum >= messages[k][a] || !may(k, a, b) || stages.seconds(k, a, b) > limit) continue;
        messages[k][a] = sum;
        end[k][a] = b;
      }
    }
  }
  std::vector<int> firsts = {0};
  for (int k = 0; k + 1 < d; ++k) firsts.push_back(end[k][firsts.back()]);
  return firsts;
}

TEST(StageSplit, EqualsEnumerationIncludingTiesAndKeepsTheMemory) {
  std::mt19937 random(5);
  int num_solved = 0;
  int num_refused = 0;
  for (int round = 0; round < 2500; ++round) {
    const StageSplitProblem problem = random_problem(random, 12, 12);
    const Tried tried = try_all(problem);
    if (!tried.is_any) continue;
    const std::optional<StageSplit> split = split_stages(problem);
    ASSERT_EQ(split.has_value(), tried.best.has_value()) << "round " << round;
    ++(split ? num_solved : num_refused);
    if (!split) continue;
    ASSERT_EQ(split->first_layers, *tried.best) << "round " << round;
    ASSERT_EQ(split->slowest, tried.slowest) << "round " << round;
  }
  EXPECT_GT(num_solved, 1000);
  EXPECT_GT(num_refused, 200);
}

TEST(StageSplit, EqualsAPlainProgramOnLongerModels) {
  std::mt19937 random(7);
  int num_solved = 0;
  for (int round = 0; round < (kSanitized ? 25 : 100); ++round) {
    StageSplitProblem problem = random_problem(random, round % 4 == 1 ? 250 : 100, 6);
    if (round % 2 == 0) problem.can_cut.clear();
    if (round % 3 == 0) problem.layers[random() % problem.layers.size()].forward = 1e6;
    if (round % 4 == 1) {  // much slack and few ties
      for (Edge& edge : problem.edges) edge.bytes = static_cast<int>(random() % 1000);
      for (StageMemoryRule& rule : problem.stages) rule.limit *= 4;
      problem.layers[random() % problem.layers.size()].forward = 1e7;
    }
    const int longest = 1 + static_cast<int>(random() % 60);
    std::erase_if(problem.edges,
                  [&](const Edge& edge) { return edge.consumer - edge.producer > longest; });
    const std::optional<std::vector<int>> expected = best_by_dp(problem);
    if (!expected) {
      EXPECT_TRUE(!problem.can_cut.empty() || !split_stages(problem));
      continue;
    }
    const std::optional<StageSplit> split = split_stages(problem);
    ASSERT_TRUE(split);
    ASSERT_EQ(split->first_layers, *expected) << "round " << round;
    ++num_solved;
  }
  EXPECT_GT(num_solved, kSanitized ? 7 : 30);
}

// The stage k over the layers first .. end - 1: its pieces, and its messages.
struct CutStage {
  CutStage(const SplitCosts& costs, int first, int end) {
    while (costs.first_layer(a) < first) ++a;
    while (costs.first_layer(b) < end) ++b;
    messages = costs.messages(a, b);
  }

  int a = 0;
  int b = 0;
  Messages messages;
};

TEST(StageSplit, CostsAreThoseOfTheDefinition) {
  std::mt19937 random(8);
  for (int round = 0; round < 300; ++round) {
    const StageSplitProblem problem = random_problem(random, 9, 9);
    if (std::ranges::count(problem.can_cut, true) + 1 < std::ssize(problem.stages)) continue;
    const SplitCosts costs(problem);
    for_each_split(problem, [&](const std::vector<int>& firsts) {
      for_each_stage(problem, firsts, [&](int k, int first, int end) {
        const StageMemoryRule& rule = problem.stages[k];
        const CutStage found(costs, first, end);
        const auto stage = testing::stage_by_definition(problem, rule.slowness, first, end);
        const Messages& messages = found.messages;
        EXPECT_EQ(costs.seconds(costs.compute(rule.slowness, found.a, found.b)), stage.compute);
        EXPECT_EQ(costs.seconds(messages.cost()), stage.messages);
        EXPECT_EQ(costs.bytes(rule, found.a, found.b, messages.received),
                  testing::bytes_by_definition(problem, rule, first, end, stage));
      });
    });
  }
}

TEST(StageSplit, AValueThatPassesOverAStageCostsItNothing) {
  StageSplitProblem problem;
  problem.layers.assign(3, {.forward = 1});
  problem.stages.assign(3, {});
  problem.edges = {{0, 1, 1}, {1, 2, 1}, {0, 2, 100}};
  problem.seconds_per_byte = 1;
  const SplitCosts costs(problem);
  const auto seconds = [&](int layer) {
    return costs.seconds(costs.messages(layer, layer + 1).cost());
  };
  EXPECT_EQ(seconds(0), 200);  // the value leaves once, in its largest size
  EXPECT_EQ(seconds(1), 4);
  EXPECT_EQ(seconds(2), 202);
}

// The chains of equal layers below: costs per layer and per cut, as a stage pays them.
StageSplitProblem chain(const std::vector<double>& costs, const std::vector<double>& cut_costs,
                        int num_stages) {
  StageSplitProblem problem;
  for (const double cost : costs) problem.layers.push_back({.forward = cost});
  for (std::size_t i = 0; i < cut_costs.size(); ++i) {
    const int layer = static_cast<int>(i);
    problem.values.push_back({layer, {layer + 1}, 0, cut_costs[i]});
  }
  problem.stages.resize(num_stages);
  return problem;
}

std::vector<int> first_layers(const StageSplitProblem& problem) {
  return split_stages(problem).value().first_layers;
}

TEST(StageSplit, RealCostsGiveTheSmallestSlowestStage) {
  std::mt19937 random(3);
  std::lognormal_distribution<double> cost(-7, 2);
  for (int round = 0; round < 700; ++round) {
    StageSplitProblem problem = random_problem(random, 10, 10);
    problem.can_cut.clear();
    for (LayerCost& layer : problem.layers) {
      layer.forward = cost(random);
      layer.input_grad = cost(random);
      layer.weight_grad = 0;
    }
    problem.seconds_per_byte = 0.1 * cost(random);
    problem.seconds_per_value = 0.1 * cost(random);
    for (Value& value : problem.values) value.seconds = 0.1 * cost(random);
    for (StageMemoryRule& rule : problem.stages) rule.slowness = 1 + cost(random);
    const Tried tried = try_all(problem);
    if (!tried.best) continue;
    EXPECT_NEAR(split_stages(problem)->slowest, tried.slowest, 1e-12 * tried.slowest)
        << "round " << round;
  }
}

TEST(StageSplit, EqualLayersOfInexactCostTieExactly) {
  EXPECT_EQ(first_layers(chain(std::vector<double>(7, 0.1), {}, 2)), (std::vector<int>{0, 3}));
  EXPECT_EQ(first_layers(chain(std::vector<double>(12, 0.1), {}, 4)),
            (std::vector<int>{0, 3, 6, 9}));
}

TEST(StageSplit, HugeAndTinyCostsDoNotOverflow) {
  const double huge = std::numeric_limits<double>::max();
  const double tiny = std::numeric_limits<double>::denorm_min();
  EXPECT_EQ(first_layers(chain(std::vector<double>(6, huge), {}, 3)), (std::vector<int>{0, 2, 4}));
  EXPECT_EQ(first_layers(chain(std::vector<double>(6, tiny), {}, 3)), (std::vector<int>{0, 2, 4}));
  EXPECT_EQ(first_layers(chain(std::vector<double>(6, huge), std::vector<double>(5, huge), 3)),
            (std::vector<int>{0, 1, 3}));
  EXPECT_EQ(first_layers(chain(std::vector<double>(4, 0), {}, 2)), (std::vector<int>{0, 1}));
}

TEST(StageSplit, OneStageAndOneLayerAStage) {
  EXPECT_EQ(first_layers(chain({3, 1, 2}, {}, 1)), (std::vector<int>{0}));
  EXPECT_EQ(first_layers(chain({3, 1, 2}, {}, 3)), (std::vector<int>{0, 1, 2}));
}

// Seconds that the call takes, and what it returns has to be a split into all stages.
double seconds_of(const StageSplitProblem& problem) {
  const std::clock_t begin = std::clock();
  const std::optional<StageSplit> split = split_stages(problem);
  const double seconds = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
  EXPECT_TRUE(split);
  EXPECT_EQ(split ? split->first_layers.size() : 0, problem.stages.size());
  return seconds;
}

struct LargeModel {
  const char* name;
  bool equal = false;  // layers and messages
  double largest = 0;  // one layer's forward
  bool skips = false;
  bool limited = false;
};

class ManyLayers : public ::testing::TestWithParam<LargeModel> {};

TEST_P(ManyLayers, InSixtyFourStagesTakeLessThanASecond) {
  std::mt19937 random(4);
  std::uniform_real_distribution<double> cost(0.5, 1.5);
  StageSplitProblem problem;
  // With a layer slower than all others together every stage has to be looked at.
  const int n = kSanitized ? 1500 : GetParam().largest > 0 ? 4000 : 10000;
  for (int i = 0; i < n; ++i) {
    problem.layers.push_back({.forward = GetParam().equal ? 1 : cost(random),
                              .activation_bytes = 1.0 * static_cast<int>(random() % 10),
                              .parameter_bytes = 4,
                              .trained_bytes = 4});
    const int bytes = GetParam().equal ? 100 : static_cast<int>(random() % 100);
    if (i > 0) problem.edges.push_back({i - 1, i, bytes});
    if (GetParam().skips && i >= 20) {
      problem.edges.push_back({i - 2 - static_cast<int>(random() % 19), i, bytes});
      if (i % 1000 == 0) problem.edges.push_back({i / 2, i, bytes});
    }
  }
  if (GetParam().largest > 0) problem.layers[n / 3].forward = GetParam().largest;
  problem.seconds_per_byte = problem.seconds_per_value = 0.01;
  for (int k = 0; k < 64; ++k) {
    StageMemoryRule rule;
    if (GetParam().limited) {
      rule = {.trained = 4, .activations = 1, .inputs = 64.0 - k, .limit = 25'000};
    }
    problem.stages.push_back(rule);
  }
  problem.recompute = GetParam().limited;
  const double seconds = seconds_of(problem);
  RecordProperty("seconds", std::to_string(seconds));
  EXPECT_LT(seconds, kSanitized ? 100.0 : 5.0);  // under one where no other jobs run beside
}

INSTANTIATE_TEST_SUITE_P(
    StageSplit, ManyLayers,
    ::testing::Values(LargeModel{.name = "Random"}, LargeModel{.name = "Equal", .equal = true},
                      LargeModel{.name = "Skips", .skips = true},
                      LargeModel{.name = "OneHuge", .largest = 1e5, .skips = true},
                      LargeModel{.name = "OneHugeOfEqual", .equal = true, .largest = 1e5},
                      LargeModel{.name = "Limited", .skips = true, .limited = true}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace pd2
