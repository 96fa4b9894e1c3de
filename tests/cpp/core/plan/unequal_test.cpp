// What a plan is told that stages of unequal width would save.
#include "core/plan/unequal.h"

#include "core/plan/plan.h"

#include <gtest/gtest.h>

#include <string>

namespace pd2 {
namespace {

// Three quarters of the work in a layer without weights, the rest in one whose weights are dear to
// add up: its all-reduce over two replicas takes 50 ms.
PlanProblem two_layers() {
  PlanProblem problem;
  ProfiledRows& profiled = problem.model.microbatches.emplace_back();
  profiled.rows = 1;
  profiled.layers = {{3e-3, 3e-3, 3e-3, 1e3, 1e3, 1e3}, {1e-3, 1e-3, 1e-3, 1e3, 5e7, 5e7}};
  profiled.edges = {{0, 1, 1000}};
  problem.cluster.types.emplace_back();
  problem.cluster.type_of.assign(4, 0);
  problem.cluster.topology = Servers{4, {0, 1e9}, {0, 1e9}};
  problem.options.batch = problem.options.largest_batch = 12;
  problem.options.schedules = {"2bw"};
  problem.options.recompute = {Recompute::kNone};
  return problem;
}

TEST(PlanUnequal, GivesMoreDevicesToTheSlowerStage) {
  const PlanProblem problem = two_layers();
  const auto found = unequal_replication(problem, 1);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->replicas, (std::vector<int>{3, 1}));
  // The second stage's 3 ms, and its message and its gradient's.
  EXPECT_DOUBLE_EQ(found->seconds_per_row, 3e-3 + 2 * 1000 / 1e9);
  EXPECT_FALSE(unequal_replication(problem, found->seconds_per_row).has_value());
}

TEST(PlanUnequal, IsToldWhereItIsFaster) {
  PlanProblem problem = two_layers();
  const auto bound_by = [&] { return explain(problem, best_plans(problem)).bound_by; };
  const std::string told =
      "; with unequal replication, which the pipeline does not run, stages of 3, 1 devices would "
      "take 36 ms a batch";
  EXPECT_NE(bound_by().find(told), std::string::npos) << bound_by();
  problem.model.microbatches[0].layers[0] = {1e-3, 1e-3, 1e-3, 1e3, 5e7, 5e7};
  problem.cluster.type_of.assign(2, 0);
  problem.cluster.topology = Servers{2, {0, 1e9}, {0, 1e9}};
  EXPECT_EQ(bound_by().find("unequal"), std::string::npos) << bound_by();
}

TEST(PlanUnequal, IsNotTriedWhereItTakesLongOrMeansNothing) {
  const auto is_tried = [](auto&& change) {
    PlanProblem problem = two_layers();
    change(problem);
    return unequal_replication(problem, 1).has_value();
  };
  EXPECT_TRUE(is_tried([](PlanProblem&) {}));
  EXPECT_FALSE(is_tried([](PlanProblem& p) { p.options.schedules = {"1f1b"}; }));
  EXPECT_FALSE(is_tried([](PlanProblem& p) { p.options.width = 1; }));
  EXPECT_FALSE(is_tried([](PlanProblem& p) { p.cluster.types.emplace_back(); }));
  EXPECT_FALSE(is_tried([](PlanProblem& p) { p.cluster.types[0].memory_bytes = 1e6; }));
  EXPECT_FALSE(
      is_tried([](PlanProblem& p) { p.cluster.type_of.assign(kMostLayersTimesDevices, 0); }));
}

}  // namespace
}  // namespace pd2
