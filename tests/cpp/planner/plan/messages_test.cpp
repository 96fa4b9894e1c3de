#include "exhaustive.h"
#include "instances.h"
#include "planner/plan/plan.h"
#include "raises.h"
#include "sanitized.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <utility>

namespace pd2 {
namespace {

using testing::best_plans_exhaustively;
using testing::Instances;
using testing::kSanitized;
using testing::value_error;

// Bytes of all values that one of a stage's layers and one of another stage's share: a value comes
// once, and its gradient from every other stage that reads it.
double bytes_of_messages(const PlanProblem& problem, const Evaluation& plan, int k) {
  const auto stage_of = [&](int layer) {
    int stage = 0;
    while (layer >= plan.stages[stage].end) ++stage;
    return stage;
  };
  std::map<std::pair<int, int>, double> sizes;  // by producer, and stage of consumers
  for (const Edge& edge : problem.model.microbatches[plan.candidate.size].edges) {
    double& size = sizes[{edge.producer, stage_of(edge.consumer)}];
    size = std::max(size, static_cast<double>(edge.bytes));
  }
  double bytes = 0;
  for (const auto& [ends, size] : sizes) {
    const int from = stage_of(ends.first);
    if (from != ends.second && (from == k || ends.second == k)) bytes += size;
  }
  return bytes;
}

TEST(Messages, AStageHoldsThoseOfMicrobatchesThatItsDeviceIsBehind) {
  Instances instances(6);
  int num_checked = 0;
  for (int round = 0; round < (kSanitized ? 5 : 50); ++round) {
    PlanProblem problem = instances.problem(10, 8);
    problem.options.microbatches_behind = 3;
    for (const Evaluation& plan : best_plans_exhaustively(problem)) {
      for (int k = 0; k < plan.candidate.shape.depth(); ++k) {
        ASSERT_EQ(plan.stages[k].message_bytes, 3 * bytes_of_messages(problem, plan, k));
        ++num_checked;
      }
    }
  }
  EXPECT_GE(num_checked, kSanitized ? 20 : 200);
}

// The first stage holds the most, and receives gradients alone.
TEST(Messages, TakeMemory) {
  PlanProblem problem;
  ProfiledRows& profiled = problem.model.microbatches.emplace_back();
  profiled.rows = 1;
  profiled.layers.assign(4, {1e-3, 1e-3, 1e-3, 1e6, 1e6, 1e6});
  for (int i = 0; i < 3; ++i) profiled.edges.push_back({i, i + 1, 100'000});
  problem.cluster.types.emplace_back();
  problem.cluster.type_of.assign(4, 0);
  problem.cluster.topology = Servers{4, {0, 1e10}, {0, 1e10}};
  problem.options.batch = problem.options.largest_batch = 32;
  problem.options.schedules = {"1f1b"};
  problem.options.recompute = {Recompute::kNone};
  problem.options.width = 1;
  problem.options.num_stages = 4;
  const double limit = 2e6 + 4 * 1e6;  // of the first stage: weights, gradient, activations
  const auto fits = [&](int behind, double bytes) {
    problem.options.microbatches_behind = behind;
    problem.cluster.types.front().memory_bytes = bytes;
    return value_error([&] { EXPECT_EQ(best_plans(problem).front().peak_bytes, bytes); }).empty();
  };
  EXPECT_TRUE(fits(0, limit));
  EXPECT_FALSE(fits(3, limit + 3 * 1e5 - 1e3));
  EXPECT_TRUE(fits(3, limit + 3 * 1e5));
}

}  // namespace
}  // namespace pd2
