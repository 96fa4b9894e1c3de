#include "planner/partition/interleaved_split.h"

#include "core/infinity.h"
#include "made_splits.h"
#include "raises.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace pd2 {
namespace {

using testing::AllStages;
using testing::for_each_split;
using testing::for_each_stage;
using testing::random_problem;
using testing::RankBytes;
using testing::value_error;

// Of the slowest rank; infinite where a rank's memory is broken.
double slowest_rank(const StageSplitProblem& problem, const AllStages& stages, int num_ranks,
                    const std::vector<int>& firsts) {
  std::vector<double> seconds(num_ranks, 0);
  std::vector<RankBytes> bytes(num_ranks);
  for_each_stage(problem, firsts, [&](int s, int a, int b) {
    seconds[s % num_ranks] += stages.seconds(s, a, b);
    bytes[s % num_ranks].add(problem, stages, s, a, b);
  });
  for (int rank = 0; rank < num_ranks; ++rank) {
    if (bytes[rank].all() > problem.stages[rank].limit) return kInfinity;
  }
  return *std::max_element(seconds.begin(), seconds.end());
}

// Makes the limits those of ranks. 0: the number of stages has no such divisor.
int give_to_ranks(StageSplitProblem& problem, std::mt19937& random) {
  const int num_stages = static_cast<int>(problem.stages.size());
  const int num_ranks = num_stages / (2 + static_cast<int>(random() % 2));
  if (num_ranks < 1 || num_stages % num_ranks != 0) return 0;
  for (int s = 0; s < num_stages; ++s) {
    problem.stages[s].limit = problem.stages[s % num_ranks].limit * (s < num_ranks ? 2 : 1);
  }
  return num_ranks;
}

TEST(InterleavedSplit, EqualsEnumerationOnSmallModelsAndKeepsTheMemory) {
  std::mt19937 random(11);
  int num_solved = 0;
  int num_refused = 0;
  for (int round = 0; round < 1500; ++round) {
    StageSplitProblem problem = random_problem(random, 12, 8);
    problem.can_cut.clear();
    const int num_ranks = give_to_ranks(problem, random);
    if (num_ranks == 0) continue;
    const AllStages stages(problem);
    double best = kInfinity;
    for_each_split(problem, [&](const std::vector<int>& firsts) {
      best = std::min(best, slowest_rank(problem, stages, num_ranks, firsts));
    });
    const auto found = split_interleaved(problem, num_ranks);
    ASSERT_EQ(found.has_value(), best < kInfinity) << "round " << round;
    ++(found ? num_solved : num_refused);
    if (!found) continue;
    EXPECT_TRUE(found->exact);
    EXPECT_EQ(found->split.slowest, best) << "round " << round;
    EXPECT_EQ(slowest_rank(problem, stages, num_ranks, found->split.first_layers), best);
  }
  EXPECT_GT(num_solved, 300);
  EXPECT_GT(num_refused, 30);
}

TEST(InterleavedSplit, NeverWorseThanTheSplitWithTheFastestSlowestStage) {
  std::mt19937 random(12);
  double gained = 0;
  int num_compared = 0;
  for (int round = 0; round < 60; ++round) {
    StageSplitProblem problem = random_problem(random, 90, 24);
    problem.can_cut.clear();
    const int num_ranks = give_to_ranks(problem, random);
    if (num_ranks == 0) continue;
    const auto found = split_interleaved(problem, num_ranks);
    const auto fastest = split_stages(problem);
    if (!fastest) continue;
    const AllStages stages(problem);
    const double before = slowest_rank(problem, stages, num_ranks, fastest->first_layers);
    if (before == kInfinity) continue;
    ASSERT_TRUE(found);
    EXPECT_LE(found->split.slowest, before);
    EXPECT_EQ(slowest_rank(problem, stages, num_ranks, found->split.first_layers),
              found->split.slowest);
    gained += 1 - found->split.slowest / before;
    ++num_compared;
  }
  EXPECT_GT(num_compared, 5);
  EXPECT_GT(gained, 0);
}

TEST(InterleavedSplit, BadArgumentsNameTheRuleAndTheValues) {
  StageSplitProblem problem;
  problem.layers.resize(4);
  problem.stages.resize(4);
  EXPECT_EQ(value_error([&] { split_interleaved(problem, 3); }),
            "num_ranks: 3, stages: 4: every rank needs the same number of stages");
  EXPECT_EQ(value_error([&] { split_interleaved(problem, 0); }),
            "num_ranks: 0, stages: 4: every rank needs the same number of stages");
  problem.stages[3].limit = 5;
  EXPECT_EQ(value_error([&] { split_interleaved(problem, 2); }),
            "stages[3].limit: 5, stages[1].limit: inf: the stages of a rank share its memory");
}

}  // namespace
}  // namespace pd2
