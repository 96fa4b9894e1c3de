#include "planner/partition/boundary_split.h"

#include "core/infinity.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace pd2 {
namespace {

struct Reached {
  double cycle = 0;    // or link
  double slowest = 0;  // stage or link
  double messages = 0;
};

Reached measure(const BoundarySplitProblem& problem, const std::vector<int>& firsts) {
  const int d = static_cast<int>(firsts.size());
  std::vector<double> seconds;
  std::vector<double> hops;
  Reached reached;
  for (int k = 0; k < d; ++k) {
    const int end = k + 1 < d ? firsts[k + 1] : static_cast<int>(problem.bytes.size()) - 1;
    seconds.push_back(problem.slowness[k] *
                      (problem.seconds_before[end] - problem.seconds_before[firsts[k]]));
    reached.slowest = std::max(reached.slowest, seconds.back());
    if (k + 1 == d) continue;
    const double transfer = problem.bytes[end] * problem.seconds_per_byte[k];
    hops.push_back(problem.latency[k] + transfer);
    reached.slowest = std::max(reached.slowest, transfer);
    reached.cycle = std::max(reached.cycle, transfer);
    reached.messages += hops.back();
  }
  for (int i = 0; i < d; ++i) {
    double sum = 0;
    for (int j = i; j < d; ++j) {
      sum += seconds[j];
      reached.cycle = std::max(reached.cycle, sum / (problem.step * (j - i) + 1));
      if (j + 1 < d) sum += 2 * hops[j];
    }
  }
  return reached;
}

TEST(BoundarySplit, HasTheFastestCycleAndTheFewestMessagesOfAll) {
  std::mt19937 random(1);
  const auto below = [&](double most) { return most * random() / 4294967296.0; };
  for (int round = 0; round < 300; ++round) {
    const int n = 4 + static_cast<int>(random() % 7);
    const int d = 2 + static_cast<int>(random() % 3);
    const int most_pieces = round % 3 == 0 ? n - d : n;
    BoundarySplitProblem problem;
    problem.seconds_before = {0};
    for (int i = 0; i < n; ++i)
      problem.seconds_before.push_back(problem.seconds_before[i] + below(1));
    for (int i = 0; i <= n; ++i) problem.bytes.push_back(below(1));
    for (int k = 0; k < d; ++k) problem.slowness.push_back(1 + round % 2 * below(1));
    for (int k = 0; k + 1 < d; ++k) {
      problem.latency.push_back(below(0.2));
      problem.seconds_per_byte.push_back(random() % 2 * below(2));
    }
    problem.step = 1 + round / 2 % 2;
    problem.fits = [&](int, int first, int end) { return end - first <= most_pieces; };
    double cycle = kInfinity;
    double slowest = cycle;
    std::vector<Reached> all;
    std::vector<char> is_first(n - 1, 0);
    std::fill(is_first.begin(), is_first.begin() + d - 1, 1);
    do {
      std::vector<int> firsts = {0};
      for (int i = 0; i + 1 < n; ++i) {
        if (is_first[i]) firsts.push_back(i + 1);
      }
      bool fits = true;
      for (int k = 0; k < d; ++k) {
        fits = fits && problem.fits(k, firsts[k], k + 1 < d ? firsts[k + 1] : n);
      }
      if (!fits) continue;
      all.push_back(measure(problem, firsts));
      cycle = std::min(cycle, all.back().cycle);
      slowest = std::min(slowest, all.back().slowest);
    } while (std::ranges::prev_permutation(is_first).found);
    const std::vector<std::vector<int>> found = split_by_boundaries(problem);
    ASSERT_EQ(found.empty(), all.empty()) << "round " << round;
    if (found.empty()) continue;
    const Reached first = measure(problem, found.front());
    EXPECT_LE(first.cycle, cycle * 1.0011) << "round " << round;
    for (const double slower : {1.0, 1.2, 2.0}) {
      double messages = kInfinity;
      for (const Reached& split : all) {
        if (split.slowest <= slower * slowest) messages = std::min(messages, split.messages);
      }
      EXPECT_TRUE(std::ranges::any_of(found,
                                      [&](const std::vector<int>& firsts) {
                                        const Reached split = measure(problem, firsts);
                                        return split.slowest <= slower * slowest * 1.0011 &&
                                               split.messages <= messages + 1e-12;
                                      }))
          << "round " << round << " slower " << slower;
    }
  }
}

TEST(BoundarySplit, OfNoTimeAndOfNothingThatFits) {
  BoundarySplitProblem problem = {.seconds_before = {0, 0, 0},
                                  .bytes = {0, 1, 0},
                                  .slowness = {1, 1},
                                  .latency = {0},
                                  .seconds_per_byte = {1},
                                  .fits = [](int, int, int) { return true; }};
  EXPECT_EQ(split_by_boundaries(problem), (std::vector<std::vector<int>>{{0, 1}}));
  problem.fits = [](int, int, int) { return false; };
  EXPECT_TRUE(split_by_boundaries(problem).empty());
}

}  // namespace
}  // namespace pd2
