#include "core/partition/replicated_split.h"

#include "made_splits.h"
#include "raises.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <random>

namespace pd2 {
namespace {

using testing::value_error;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

StageSplitProblem without_replicas(const ReplicationProblem& problem) {
  StageSplitProblem split;
  split.layers = problem.layers;
  split.edges = problem.edges;
  split.values = problem.values;
  split.can_cut = problem.can_cut;
  split.seconds_per_byte = problem.seconds_per_byte;
  split.seconds_per_value = problem.seconds_per_value;
  split.recompute = problem.recompute;
  return split;
}

// By definition; infinite where it is no split or breaks the memory.
double slowest_stage(const ReplicationProblem& problem, const std::vector<int>& firsts,
                     const std::vector<int>& replicas) {
  const StageSplitProblem split = without_replicas(problem);
  double slowest = 0;
  int machines = std::accumulate(replicas.begin(), replicas.end(), 0);
  for (std::size_t k = 0; k < firsts.size(); ++k) {
    const int a = firsts[k];
    const int b = k + 1 < firsts.size() ? firsts[k + 1] : static_cast<int>(split.layers.size());
    if (a > 0 && !split.can_cut[a - 1]) return kInfinity;
    const auto stage = testing::stage_by_definition(split, 1, a, b);
    const double w = replicas[k];
    const double in_flight =
        std::min(std::ceil(machines / w), std::ceil(problem.num_microbatches / w));
    StageMemoryRule rule;
    rule.trained = problem.trained;
    rule.frozen = problem.frozen;
    rule.activations = problem.recompute ? 1 : in_flight;
    rule.inputs = problem.recompute ? in_flight : 0;
    const double bytes = testing::bytes_by_definition(split, rule, a, b, stage);
    if (bytes > problem.limit) return kInfinity;
    double trained = 0;
    for (int i = a; i < b; ++i) trained += split.layers[i].trained_bytes;
    const double all_reduce = 2 * (w - 1) / w * trained * problem.all_reduce_seconds_per_byte +
                              2 * (w - 1) * problem.all_reduce_seconds_per_step;
    slowest = std::max({slowest, stage.seconds() / w, all_reduce / problem.num_microbatches});
    machines -= replicas[k];
  }
  return slowest;
}

// All splits and all numbers of replicas.
double best_by_enumeration(const ReplicationProblem& problem) {
  double best = kInfinity;
  std::vector<int> firsts;
  std::vector<int> replicas;
  const std::function<void(int, int)> add_stage = [&](int first, int machines) {
    firsts.push_back(first);
    for (int w = 1; w <= machines; ++w) {
      replicas.push_back(w);
      best = std::min(best, slowest_stage(problem, firsts, replicas));
      for (int next = first + 1; next < static_cast<int>(problem.layers.size()); ++next) {
        add_stage(next, machines - w);
      }
      replicas.pop_back();
    }
    firsts.pop_back();
  };
  add_stage(0, problem.num_machines);
  return best;
}

ReplicationProblem random_replication(std::mt19937& random) {
  const auto below = [&](int n) { return static_cast<int>(random() % n); };
  const StageSplitProblem split = testing::random_problem(random, 6, 3);
  ReplicationProblem problem;
  problem.layers = split.layers;
  problem.edges = split.edges;
  problem.values = split.values;
  problem.can_cut = split.can_cut;
  problem.seconds_per_byte = split.seconds_per_byte;
  problem.seconds_per_value = split.seconds_per_value;
  problem.recompute = split.recompute;
  problem.num_machines = 1 + below(6);
  problem.num_microbatches = 1 + below(8);
  problem.all_reduce_seconds_per_byte = below(5);
  problem.all_reduce_seconds_per_step = below(5);
  problem.trained = 1 + below(3);
  if (below(4) > 0) problem.limit = 20 + below(120);
  return problem;
}

TEST(ReplicatedSplit, EqualsEnumerationAndKeepsTheMemory) {
  std::mt19937 random(13);
  int num_solved = 0;
  int num_refused = 0;
  int num_replicated = 0;
  for (int round = 0; round < 800; ++round) {
    const ReplicationProblem problem = random_replication(random);
    const double best = best_by_enumeration(problem);
    const auto found = split_replicated(problem);
    ASSERT_EQ(found.has_value(), best < kInfinity) << "round " << round;
    ++(found ? num_solved : num_refused);
    if (!found) continue;
    EXPECT_NEAR(found->slowest, best, 1e-12 * best) << "round " << round;
    EXPECT_NEAR(slowest_stage(problem, found->first_layers, found->replicas), best, 1e-12 * best);
    EXPECT_LE(std::accumulate(found->replicas.begin(), found->replicas.end(), 0),
              problem.num_machines);
    num_replicated += *std::max_element(found->replicas.begin(), found->replicas.end()) > 1;
  }
  EXPECT_GT(num_solved, 300);
  EXPECT_GT(num_refused, 50);
  EXPECT_GT(num_replicated, 50);
}

// PipeDream's own example of VGG: convolutions replicated, the large dense layers not.
TEST(ReplicatedSplit, LargeWeightsAreNotReplicatedAndLongComputeIs) {
  ReplicationProblem problem;
  problem.layers = {{.forward = 30, .parameter_bytes = 1, .trained_bytes = 1},
                    {.forward = 10, .parameter_bytes = 1000, .trained_bytes = 1000}};
  problem.num_machines = 4;
  problem.num_microbatches = 4;
  problem.all_reduce_seconds_per_byte = 1;
  const auto found = split_replicated(problem);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->first_layers, (std::vector<int>{0, 1}));
  EXPECT_EQ(found->replicas, (std::vector<int>{3, 1}));
  EXPECT_EQ(found->slowest, 10);
}

TEST(ReplicatedSplit, BadArgumentsNameTheRuleAndTheValues) {
  ReplicationProblem problem;
  problem.layers.resize(2);
  problem.num_machines = 0;
  EXPECT_EQ(value_error([&] { split_replicated(problem); }), "num_machines: 0: must be >= 1");
  problem.num_machines = 2;
  problem.num_microbatches = 0;
  EXPECT_EQ(value_error([&] { split_replicated(problem); }), "num_microbatches: 0: must be >= 1");
  problem.num_microbatches = 1;
  problem.all_reduce_seconds_per_step = -1;
  EXPECT_EQ(value_error([&] { split_replicated(problem); }),
            "all_reduce_seconds_per_byte: 0, all_reduce_seconds_per_step: -1: both must be finite "
            "and >= 0");
  problem.all_reduce_seconds_per_step = 0;
  problem.layers[1].forward = -1;
  EXPECT_EQ(value_error([&] { split_replicated(problem); }),
            "layers[1].forward: -1: must be finite and >= 0");
}

}  // namespace
}  // namespace pd2
