// Plans whose ranks have several stages: their work and their memory are the rank's, not a stage's.
#include "core/infinity.h"
#include "instances.h"
#include "planner/partition/split_costs.h"
#include "planner/plan/plan.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace pd2 {
namespace {

using testing::Instances;

constexpr int kRanks = 2;
constexpr int kStages = 4;

// A chain on two free devices, of which interleaved has two stages each.
PlanProblem chain(Instances& instances) {
  PlanProblem problem;
  ProfiledRows& profiled = problem.model.microbatches.emplace_back();
  profiled.rows = 1;
  const int n = kStages + 1 + instances.below(6);
  for (int i = 0; i < n; ++i) {
    const double seconds = 1e-3 * instances.between(0.2, 2);
    const double bytes = 1e6 * instances.between(0.1, 2);
    profiled.layers.push_back({seconds, seconds, seconds, bytes, bytes, bytes});
    if (i > 0) profiled.edges.push_back({i - 1, i, 1000});
  }
  problem.cluster.types.emplace_back();
  problem.cluster.type_of.assign(kRanks, 0);
  problem.cluster.topology = Servers{kRanks, {}, {}};
  PlanOptions& options = problem.options;
  options.batch = options.largest_batch = 8;
  options.width = 1;
  options.num_stages = kStages;
  options.schedules = {"interleaved"};
  options.recompute = {Recompute::kNone};
  return problem;
}

StageSplitProblem as_split(const PlanProblem& problem, const PipelineShape& shape) {
  StageSplitProblem split;
  split.layers = problem.model.microbatches[0].layers;
  split.edges = problem.model.microbatches[0].edges;
  split.stages.resize(kStages);
  for (int stage = 0; stage < kStages; ++stage) {
    split.stages[stage].trained = 1 + problem.options.gradient + problem.options.state;
    split.stages[stage].activations = most_in_flight(shape, stage);
  }
  return split;
}

// Of the rank that has the least to spare.
double fullest_rank(const SplitCosts& costs, std::vector<int> firsts) {
  firsts.push_back(costs.num_pieces());
  std::vector<double> bytes(kRanks, 0);
  for (int stage = 0; stage < kStages; ++stage) {
    const int a = firsts[stage];
    const int b = firsts[stage + 1];
    bytes[stage % kRanks] += costs.bytes(costs.rule(stage), a, b, costs.messages(a, b).received);
  }
  return *std::ranges::max_element(bytes);
}

// The least memory of a device that any split needs.
double least_memory(const StageSplitProblem& split) {
  const SplitCosts costs(split);
  const int n = costs.num_pieces();
  double least = kInfinity;
  for (int a = 1; a < n; ++a) {
    for (int b = a + 1; b < n; ++b) {
      for (int c = b + 1; c < n; ++c) least = std::min(least, fullest_rank(costs, {0, a, b, c}));
    }
  }
  return least;
}

TEST(PlanInterleaved, FitsIfAnySplitFitsTheRanks) {
  Instances instances(1);
  int num_uneven = 0;
  for (int round = 0; round < 60; ++round) {
    PlanProblem problem = chain(instances);
    const DeviceMappings mappings(problem.cluster);
    const Candidate candidate = candidates(problem, mappings).front();
    const StageSplitProblem split = as_split(problem, candidate.shape);
    const double least = least_memory(split);
    double& limit = problem.cluster.types[0].memory_bytes;
    limit = least * 1.0001;
    const auto found = Evaluator(problem, mappings).evaluate(candidate);
    ASSERT_TRUE(found.has_value()) << "round " << round;
    EXPECT_LE(found->peak_bytes, limit * (1 + 1e-9));
    num_uneven += 2 * smallest_memory_limit(split) > limit;
    limit = least * 0.9999;
    EXPECT_FALSE(Evaluator(problem, mappings).evaluate(candidate).has_value()) << "round " << round;
  }
  EXPECT_GT(num_uneven, 30);
}

TEST(PlanInterleaved, IsNeverSlowerThanWithTheFastestStages) {
  Instances instances(2);
  int num_faster = 0;
  for (int round = 0; round < 60; ++round) {
    const PlanProblem problem = chain(instances);
    const DeviceMappings mappings(problem.cluster);
    const Candidate candidate = candidates(problem, mappings).front();
    const StageSplitProblem split = as_split(problem, candidate.shape);
    const std::vector<int> firsts = split_stages(split)->first_layers;
    Costs costs;
    for (int stage = 0; stage < kStages; ++stage) {
      const int end = stage + 1 < kStages ? firsts[stage + 1] : problem.model.num_layers();
      double seconds = 0;
      for (int i = firsts[stage]; i < end; ++i) seconds += split.layers[i].forward;
      costs.stages.push_back({.forward = seconds, .input_grad = seconds, .weight_grad = seconds});
    }
    const double fastest_stages = step_time(candidate.shape, costs).seconds;
    const double planned = Evaluator(problem, mappings).evaluate(candidate)->time.seconds;
    EXPECT_LE(planned, fastest_stages * (1 + 1e-9)) << "round " << round;
    num_faster += planned < 0.99 * fastest_stages;
  }
  EXPECT_GT(num_faster, 10);
}

}  // namespace
}  // namespace pd2
