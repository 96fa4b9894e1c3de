#include "core/partition.h"

#include "raises.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <ctime>
#include <limits>
#include <optional>
#include <random>
#include <tuple>

namespace pd2 {
namespace {

using testing::value_error;

struct Instance {
  std::vector<double> costs;
  std::vector<double> cut_costs;
  std::vector<bool> can_cut;
  int num_stages = 1;

  std::vector<int> partitioned() const { return partition(costs, cut_costs, num_stages, can_cut); }

  double slowest(const std::vector<int>& firsts) const {
    double slowest = 0;
    for (std::size_t k = 0; k < firsts.size(); ++k) {
      const int begin = firsts[k];
      const int end = k + 1 < firsts.size() ? firsts[k + 1] : static_cast<int>(costs.size());
      double cost = begin > 0 ? cut_costs[begin - 1] : 0;
      for (int i = begin; i < end; ++i) cost += costs[i];
      if (end < static_cast<int>(costs.size())) cost += cut_costs[end - 1];
      slowest = std::max(slowest, cost);
    }
    return slowest;
  }

  double total_cut(const std::vector<int>& firsts) const {
    double total = 0;
    for (std::size_t k = 1; k < firsts.size(); ++k) total += cut_costs[firsts[k] - 1];
    return total;
  }
};

// Tries every set of cuts.
std::optional<std::vector<int>> best_by_enumeration(const Instance& instance) {
  const int n = static_cast<int>(instance.costs.size());
  std::optional<std::tuple<double, double, std::vector<int>>> best;
  for (unsigned cuts = 0; cuts < 1u << (n - 1); ++cuts) {
    std::vector<int> firsts = {0};
    bool legal = true;
    for (int i = 0; i < n - 1; ++i) {
      if ((cuts >> i & 1) == 0) continue;
      firsts.push_back(i + 1);
      legal = legal && instance.can_cut[i];
    }
    if (!legal || static_cast<int>(firsts.size()) != instance.num_stages) continue;
    const auto candidate = std::tuple(instance.slowest(firsts), instance.total_cut(firsts), firsts);
    if (!best || candidate < *best) best = candidate;
  }
  if (!best) return std::nullopt;
  return std::get<2>(*best);
}

// Small whole numbers: sums are exact, ties are many.
Instance random_instance(std::mt19937& random, int largest_cost, int largest_cut) {
  const auto below = [&](int n) { return static_cast<int>(random() % n); };
  Instance instance;
  const int n = 1 + below(10);
  instance.num_stages = 1 + below(n);
  for (int i = 0; i < n; ++i) instance.costs.push_back(below(largest_cost + 1));
  const bool often_cut = below(2) == 0;
  for (int i = 0; i < n - 1; ++i) {
    instance.cut_costs.push_back(below(largest_cut + 1));
    instance.can_cut.push_back(often_cut || below(3) > 0);
  }
  return instance;
}

TEST(Partition, EqualsEnumerationIncludingTies) {
  std::mt19937 random(2);
  int num_solved = 0;
  for (int round = 0; round < 3000; ++round) {
    const Instance instance =
        random_instance(random, round % 3 == 0 ? 2 : 30, round % 4 == 0 ? 0 : 10);
    const std::optional<std::vector<int>> expected = best_by_enumeration(instance);
    if (!expected) {
      EXPECT_THROW(instance.partitioned(), ValueError);
      continue;
    }
    ASSERT_EQ(instance.partitioned(), *expected) << "round " << round;
    ++num_solved;
  }
  EXPECT_GT(num_solved, 1500);
}

TEST(Partition, SlowestStageOfRealCostsIsTheSmallest) {
  std::mt19937 random(3);
  std::lognormal_distribution<double> cost(-7, 2);
  for (int round = 0; round < 1500; ++round) {
    Instance instance = random_instance(random, 1, 1);
    for (double& each : instance.costs) each = cost(random);
    for (double& each : instance.cut_costs) each = 0.1 * cost(random);
    const std::optional<std::vector<int>> expected = best_by_enumeration(instance);
    if (!expected) continue;
    const double best = instance.slowest(*expected);
    EXPECT_NEAR(instance.slowest(instance.partitioned()), best, 1e-12 * best) << "round " << round;
  }
}

TEST(Partition, EqualLayersOfInexactCostTieExactly) {
  const std::vector<double> costs(7, 0.1);
  EXPECT_EQ(partition(costs, {}, 2, {}), (std::vector<int>{0, 3}));
  EXPECT_EQ(partition(std::vector<double>(12, 0.1), {}, 4, {}), (std::vector<int>{0, 3, 6, 9}));
}

TEST(Partition, HugeAndTinyCostsDoNotOverflow) {
  const double huge = std::numeric_limits<double>::max();
  const double tiny = std::numeric_limits<double>::denorm_min();
  EXPECT_EQ(partition(std::vector<double>(6, huge), {}, 3, {}), (std::vector<int>{0, 2, 4}));
  EXPECT_EQ(partition(std::vector<double>(6, tiny), {}, 3, {}), (std::vector<int>{0, 2, 4}));
  EXPECT_EQ(partition(std::vector<double>(6, huge), std::vector<double>(5, huge), 3, {}),
            (std::vector<int>{0, 1, 3}));
  EXPECT_EQ(partition(std::vector<double>(4, 0), {}, 2, {}), (std::vector<int>{0, 1}));
}

TEST(Partition, OneStageAndOneLayerAStage) {
  const std::vector<double> costs = {3, 1, 2};
  EXPECT_EQ(partition(costs, {}, 1, {}), (std::vector<int>{0}));
  EXPECT_EQ(partition(costs, {}, 3, {}), (std::vector<int>{0, 1, 2}));
}

TEST(Partition, TenThousandLayersInSixtyFourStagesTakeLessThanASecond) {
  std::mt19937 random(4);
  std::uniform_real_distribution<double> cost(0.5, 1.5);
  Instance instance;
  instance.num_stages = 64;
  for (int i = 0; i < 10000; ++i) instance.costs.push_back(cost(random));
  for (int i = 0; i < 9999; ++i) instance.cut_costs.push_back(cost(random));
  const std::clock_t begin = std::clock();
  const std::vector<int> firsts = instance.partitioned();
  const double seconds = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
  RecordProperty("seconds", std::to_string(seconds));
  EXPECT_EQ(firsts.size(), 64u);
  EXPECT_LT(instance.slowest(firsts), 10000.0 / 64 + 3);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  EXPECT_LT(seconds, 1.0);
#endif
}

TEST(Partition, BadArgumentsNameTheRuleAndTheValues) {
  const std::vector<double> costs = {1, 2, 3};
  const std::vector<double> two = {1, 1};
  EXPECT_EQ(value_error([&] { partition(costs, {}, 5, {}); }),
            "num_stages: 5, layers: 3: every stage needs at least one layer");
  EXPECT_EQ(value_error([&] { partition({}, {}, 1, {}); }),
            "num_stages: 1, layers: 0: every stage needs at least one layer");
  EXPECT_EQ(value_error([&] { partition(costs, {}, 0, {}); }),
            "num_stages: 0: a pipeline needs num_stages >= 1");
  EXPECT_EQ(value_error([&] {
              partition(costs, two, 3, {false, true});
            }),
            "num_stages: 3, allowed cuts: 1: needs num_stages - 1 = 2 allowed cuts");
  EXPECT_EQ(value_error([&] { partition(costs, costs, 2, {}); }),
            "cut_costs: 3, layers: 3: needs layers - 1 entries, or none");
  EXPECT_EQ(value_error([&] { partition(costs, {}, 2, {true}); }),
            "can_cut: 1, layers: 3: needs layers - 1 entries, or none");
  EXPECT_EQ(value_error([&] {
              partition(std::vector<double>{1, -2, 3}, {}, 2, {});
            }),
            "costs[1]: -2: a cost must be finite and >= 0");
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(value_error([&] {
              partition(costs, std::vector<double>{nan, 1}, 2, {});
            }),
            "cut_costs[0]: nan: a cost must be finite and >= 0");
}

}  // namespace
}  // namespace pd2
