#include "planner/partition/folded_split.h"

#include "core/infinity.h"
#include "made_splits.h"

#include <gtest/gtest.h>

namespace pd2 {
namespace {

using testing::AllStages;

struct Ranks {
  double slowest = 0;  // compute
  bool fits = true;
};

Ranks ranks_of(const StageSplitProblem& problem, const AllStages& stages,
               const std::vector<int>& firsts) {
  const int d = static_cast<int>(firsts.size());
  std::vector<double> seconds(d, 0);
  std::vector<testing::RankBytes> bytes(d);
  testing::for_each_stage(problem, firsts, [&](int k, int a, int b) {
    const int rank = std::min(k, d - 1 - k);
    seconds[rank] += stages.seconds(k, a, b) - stages.messages(a, b);
    bytes[rank].add(problem, stages, k, a, b);
  });
  Ranks ranks;
  for (int r = 0; r < d / 2; ++r) {
    const double limit = std::min(problem.stages[r].limit, problem.stages[d - 1 - r].limit);
    ranks.slowest = std::max(ranks.slowest, seconds[r]);
    ranks.fits = ranks.fits && bytes[r].all() <= limit;
  }
  return ranks;
}

bool can_be_folded(const StageSplitProblem& problem) {
  const auto cuts = std::ranges::count(problem.can_cut, true);
  return problem.stages.size() % 2 == 0 && cuts + 1 >= std::ssize(problem.stages);
}

TEST(FoldedSplit, KeepsMemoryAndComesCloseToTheBestOfAllSplits) {
  std::mt19937 random(3);
  int num_found = 0;
  int num_missed = 0;  // something fits that is not found
  double worst = 1;
  double sum = 0;
  for (int round = 0; round < 6000; ++round) {
    const StageSplitProblem problem = testing::random_problem(random, 10, 6);
    if (!can_be_folded(problem)) continue;
    const AllStages stages(problem);
    double best = kInfinity;
    testing::for_each_split(problem, [&](const std::vector<int>& firsts) {
      const Ranks ranks = ranks_of(problem, stages, firsts);
      if (ranks.fits) best = std::min(best, ranks.slowest);
    });
    const std::optional<std::vector<int>> found = split_folded(problem);
    if (!found) {
      num_missed += best < kInfinity;
      continue;
    }
    ASSERT_EQ(found->size(), problem.stages.size());
    ASSERT_EQ(found->front(), 0);
    const int n = static_cast<int>(problem.layers.size());
    for (std::size_t k = 1; k < found->size(); ++k) {
      ASSERT_LT((*found)[k - 1], (*found)[k]);
      ASSERT_LT((*found)[k], n);
      ASSERT_TRUE(problem.can_cut.empty() || problem.can_cut[(*found)[k] - 1]);
    }
    const Ranks ranks = ranks_of(problem, stages, *found);
    ASSERT_TRUE(ranks.fits) << "round " << round;
    ASSERT_GE(ranks.slowest, best);
    if (best == 0) continue;
    ++num_found;
    worst = std::max(worst, ranks.slowest / best);
    sum += ranks.slowest / best;
  }
  EXPECT_GT(num_found, 500);
  EXPECT_LT(num_missed, num_found / 10);
  EXPECT_LT(sum / num_found, 1.05);
  EXPECT_LT(worst, 3);
}

TEST(FoldedSplit, SmallLayersAreSharedOutEvenly) {
  std::mt19937 random(4);
  StageSplitProblem problem;
  double total = 0;
  for (int i = 0; i < 2000; ++i) {
    const double seconds = 1 + (random() % 100) / 100.0;
    total += 3 * seconds;
    problem.layers.push_back({seconds, seconds, seconds, 1, 1, 1});
  }
  problem.stages.resize(64);
  const auto firsts = split_folded(problem);
  ASSERT_TRUE(firsts);
  double slowest = 0;
  const auto seconds_of = [&](int k) {
    double sum = 0;
    for (int i = (*firsts)[k]; i < (k + 1 < 64 ? (*firsts)[k + 1] : 2000); ++i) {
      sum += 3 * problem.layers[i].forward;
    }
    return sum;
  };
  for (int r = 0; r < 32; ++r) slowest = std::max(slowest, seconds_of(r) + seconds_of(63 - r));
  EXPECT_LT(slowest, 1.01 * total / 32);
}

}  // namespace
}  // namespace pd2
