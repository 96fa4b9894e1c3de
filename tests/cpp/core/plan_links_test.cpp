// Plans where links differ: which messages take which link, and how near to the best split they
// are.

#include "core/generate.h"
#include "core/plan.h"
#include "plan_instances.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

namespace pd2 {
namespace {

using testing::Instances;

constexpr Link kFast = {0, 1e12};

LinkMatrix matrix(int devices, const std::vector<std::pair<int, int>>& slow, Link link) {
  LinkMatrix matrix = {devices, std::vector<Link>(devices * devices, kFast)};
  for (const auto& [a, b] : slow) {
    matrix.links[a * devices + b] = matrix.links[b * devices + a] = link;
  }
  return matrix;
}

// A chain of so many layers, on as many devices as stages, one microbatch size.
PlanProblem chain(const std::vector<double>& seconds, const std::vector<std::int64_t>& bytes,
                  int stages, const std::string& schedule) {
  PlanProblem problem;
  ProfiledRows& profiled = problem.model.microbatches.emplace_back();
  profiled.rows = 1;
  for (const double each : seconds) profiled.layers.push_back({each, each, each, 1e3, 1e3, 1e3});
  for (int i = 0; i + 1 < static_cast<int>(seconds.size()); ++i) {
    profiled.edges.push_back({i, i + 1, bytes[i]});
  }
  problem.cluster.types.emplace_back();
  problem.cluster.type_of.assign(stages, 0);
  problem.cluster.topology = matrix(stages, {}, kFast);
  problem.options.batch = problem.options.largest_batch = 8;
  problem.options.width = 1;
  problem.options.num_stages = stages;
  problem.options.schedules = {schedule};
  problem.options.recompute = {Recompute::kNone};
  return problem;
}

// 100 MB from the first layer to the last one, past the stages between.
PlanProblem with_skip(const std::string& schedule) {
  PlanProblem problem =
      chain(std::vector<double>(8, 1e-3), std::vector<std::int64_t>(7, 10'000), 4, schedule);
  problem.model.microbatches.front().edges.push_back({0, 7, 100'000'000});
  return problem;
}

TEST(PlanLinks, ASkipKeepsOffTheSlowLink) {
  const Link slow = {0, 1e9};  // 0.1 s a message
  for (int a = 0; a < 4; ++a) {
    for (int b = a + 1; b < 4; ++b) {
      PlanProblem problem = with_skip("2bw");
      problem.cluster.topology = matrix(4, {{a, b}}, slow);
      const Evaluation plan = best_plans(problem).front();
      // The three other links are a way from one end to the other.
      EXPECT_LT(plan.time.seconds, 0.13) << a << " " << b;
      ASSERT_EQ(plan.costs.skips.size(), 1u);
      EXPECT_EQ(plan.costs.skips.front().edge.bandwidth, 1e12) << a << " " << b;
    }
  }
}

TEST(PlanLinks, ASkipOverASlowLinkTakesItsTime) {
  PlanProblem problem = with_skip("2bw");
  for (const std::string& name : planned_schedules()) {
    problem.options.schedules = {name};
    problem.options.num_stages = name == "interleaved" ? 8 : 4;
    // Every link but one way through the devices: the ends of chimera's pipelines meet, too.
    problem.cluster.topology = Servers{1, {}, {0, 1e9}};
    const Evaluation plan = best_plans(problem).front();
    const int last = plan.candidate.shape.depth() - 1;
    ASSERT_EQ(plan.costs.skips.size(), 1u) << name;
    EXPECT_EQ(plan.costs.skips.front().from, 0);
    EXPECT_EQ(plan.costs.skips.front().to, last);
    EXPECT_EQ(plan.costs.edges.front().message_bytes, 10'000);
    EXPECT_GE(plan.time.seconds, 8 * 0.0999 * (name == "chimera" ? 0.5 : 1)) << name;
    EXPECT_DOUBLE_EQ(plan.stages.front().message, 0.1) << name;
    EXPECT_EQ(plan.stages.front().receiver, last);
    EXPECT_DOUBLE_EQ(plan.stages[1].message, 1e-5) << name;
    EXPECT_EQ(plan.stages[1].receiver, 2);
    EXPECT_EQ(plan.stages.back().message, 0) << name;
    const std::string why = explain(problem, {plan}).bound_by;
    EXPECT_EQ(why.find("the link from stage 0 to " + std::to_string(last)), 0u) << name << why;
  }
}

// What a stage reads of several stages comes over several links, of each value once.
TEST(PlanLinks, ValuesGoFromTheStageThatMakesThemToEachThatReadsThem) {
  PlanProblem problem = chain({1, 1, 1, 1}, {10, 20, 30}, 4, "1f1b");
  std::vector<Edge>& edges = problem.model.microbatches.front().edges;
  edges.insert(edges.end(), {{0, 2, 10}, {0, 3, 10}, {1, 3, 5}});
  const Evaluation plan = best_plans(problem).front();
  ASSERT_EQ(plan.costs.edges.size(), 3u);
  for (int k = 0; k < 3; ++k) EXPECT_EQ(plan.costs.edges[k].message_bytes, 10 * (k + 1));
  ASSERT_EQ(plan.costs.skips.size(), 3u);
  const int expected[][3] = {{0, 2, 10}, {0, 3, 10}, {1, 3, 5}};
  for (int i = 0; i < 3; ++i) {
    const SkipCosts& skip = plan.costs.skips[i];
    EXPECT_EQ(skip.from, expected[i][0]);
    EXPECT_EQ(skip.to, expected[i][1]);
    EXPECT_EQ(skip.edge.message_bytes, expected[i][2]);
  }
}

}  // namespace
}  // namespace pd2
