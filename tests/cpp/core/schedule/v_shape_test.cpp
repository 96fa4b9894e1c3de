#include "core/schedule/v_shape.h"

#include "core/schedule/generate.h"
#include "core/schedule/methods.h"
#include "core/schedule/unroll.h"
#include "core/schedule/validate.h"
#include "planner/simulate/simulate.h"
#include "raises.h"
#include "sanitized.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <string>
#include <tuple>
#include <vector>

namespace pd2 {
namespace {

using enum ActionKind;
using testing::value_error;

const std::vector<std::string> kWithTwoVersions = {"2bw_v", "2bw_v_two_thirds", "2bw_v_half",
                                                   "2bw_v_min"};
const std::vector<std::string> kFlushed = {"zero_bubble_v", "v_half", "v_min"};

Schedule made(const std::string& name, int ranks, int m) {
  return make_schedule(name, 2 * ranks, m, 2);
}

int least(const std::string& name, int ranks) {
  return find_method(name)->least_microbatches(ranks, 2);
}

// F and I of a rank in the order of the slots that zero-bubble's stable patterns give them (their
// order alone counts), as far as all of a period's are there.
std::vector<std::tuple<int, char, int>> by_slots(const std::array<int, 4>& slots, int stage,
                                                 int twin) {
  std::vector<std::pair<int, std::tuple<int, char, int>>> all;
  for (int n = 0; n < 60; ++n) {
    all.push_back({slots[0] + 6 * n, {stage, 'F', n}});
    all.push_back({slots[1] + 6 * n, {twin, 'F', n}});
    all.push_back({slots[2] + 6 * n, {twin, 'I', n}});
    all.push_back({slots[3] + 6 * n, {stage, 'I', n}});
  }
  std::ranges::sort(all);
  std::vector<std::tuple<int, char, int>> order;
  for (const auto& [slot, action] : all) {
    if (slot < 6 * 60) order.push_back(action);
  }
  return order;
}

TEST(VShape, TheOrdersAreThoseOfTheStablePatterns) {
  for (int p = 1; p <= 12; ++p) {
    const int half = p % 2 == 0 ? 3 : 0, third = p % 3 == 0 ? 2 : 0;
    for (const std::string name : {"2bw_v_half", "2bw_v_min"}) {
      const Schedule schedule = made(name, p, 60);
      for (int i = 0; i < p; ++i) {
        const std::array<int, 4> slots =
            name == "2bw_v_half"
                ? std::array{2 * i, 3 * p - i - 2, 3 * p + half + 2 * i - 1, 6 * p + half - i - 2}
                : std::array{i, 2 * p - i - 1, 2 * p + third + i, 4 * p + third - i - 1};
        std::vector<std::tuple<int, char, int>> found;
        for (const Action& action : schedule.ranks[i].prologue) {
          if (action.kind == kForward || action.kind == kInputGrad) {
            found.emplace_back(action.stage, static_cast<char>(action.kind), action.microbatch);
          }
        }
        const auto want = by_slots(slots, i, 2 * p - 1 - i);
        ASSERT_GE(found.size(), want.size() - 12);
        found.resize(want.size() - 12);
        EXPECT_TRUE(std::equal(found.begin(), found.end(), want.begin()))
            << name << " p " << p << " rank " << i;
      }
    }
  }
}

TEST(VShape, AllAreLegalFromTheFewestMicrobatchesOn) {
  for (const auto* names : {&kWithTwoVersions, &kFlushed}) {
    for (const std::string& name : *names) {
      for (int p = 1; p <= 20; ++p) {
        const int m = least(name, p);
        for (const int more : {0, 1, 7}) {
          const Schedule schedule = made(name, p, m + more);
          EXPECT_EQ(value_error([&] { validate(schedule); }), "") << name << p << " " << m + more;
        }
        if (m == 1) continue;
        EXPECT_NE(value_error([&] { made(name, p, m - 1); }), "") << name << " " << p;
        const Schedule short_one =
            make_v_schedule(name, v_periods(p, find_method(name)->v).value(), m - 1, false);
        EXPECT_NE(value_error([&] { validate(short_one); }), "") << name << " " << p;
      }
    }
  }
}

// Of a rank's two stages together, which are as long as one of 2bw's.
double most_in_flight(const Schedule& schedule, int rank) {
  const int twin = schedule.num_stages - 1 - rank;
  Costs costs;
  costs.stages.assign(schedule.num_stages, {.forward = 1, .input_grad = 1, .weight_grad = 1});
  for (StageCosts& stage : costs.stages) stage.activation_bytes = 0.5;
  PD2_ASSERT(twin != rank, twin);
  return simulate(schedule, costs, 6).peak_bytes[rank];
}

TEST(VShape, RanksHoldAsManyActivationsAsTheNameSays) {
  for (const int p : {4, 8, 16, 32}) {
    if (testing::kSanitized && p > 16) continue;
    const auto expect_all = [&](const std::string& name, double fewest, double most) {
      const Schedule schedule = made(name, p, std::max(2 * p, least(name, p)));
      for (int rank = 0; rank < p; ++rank) {
        const double found = most_in_flight(schedule, rank);
        EXPECT_GE(found, fewest) << name << " " << p << " " << rank;
        EXPECT_LE(found, most) << name << " " << p << " " << rank;
      }
    };
    expect_all("2bw_v", p, p);
    expect_all("2bw_v_two_thirds", 2 * p / 3, 2 * p / 3 + 1);
    expect_all("2bw_v_half", p / 2 + 1, p / 2 + 1);
    expect_all("2bw_v_min", p / 3 + 1, p / 3 + 2);
  }
}

// Over the ideal, at a hop of a share of a rank's F + I + W.
double period(const std::string& name, int p, double i, double w, double hop) {
  const Schedule schedule = made(name, p, std::max(2 * p, least(name, p)));
  Costs costs;
  costs.stages.assign(2 * p, {.forward = 1, .input_grad = i, .weight_grad = w});
  costs.edges.assign(2 * p - 1, {.latency = hop * 2 * (1 + i + w)});
  const double ideal = schedule.num_microbatches * 2 * (1 + i + w);
  return simulate(schedule, costs, 4).period / ideal;
}

TEST(VShape, NoneHasABubbleWhereItsThreePartsTakeTheSameTime) {
  for (const std::string& name : kWithTwoVersions) {
    for (const int p : {1, 2, 3, 4, 5, 8, 16}) EXPECT_NEAR(period(name, p, 1, 1, 0), 1, 1e-9);
  }
}

TEST(VShape, TheLongerTheWayTheSlowerMessagesMayBe) {
  for (const int p : {4, 8, 16}) {
    for (const auto& [i, w] : {std::pair(1.0, 1.0), std::pair(1.2, 0.8), std::pair(0.9, 1.1)}) {
      EXPECT_NEAR(period("2bw_v", p, i, w, 0.2), 1, 1e-9) << p;
      EXPECT_NEAR(period("2bw_v_two_thirds", p, i, w, 0.1), 1, 1e-9) << p;
      EXPECT_LE(period("2bw_v_half", p, i, w, 0.05), 1.034) << p;
    }
    EXPECT_NEAR(period("2bw_v_half", p, 1, 1, 0.05), 1, 1e-9) << p;
    EXPECT_NEAR(period("2bw_v_half", p, 1.2, 0.8, 0), 1, 1e-9) << p;
    EXPECT_GT(period("2bw_v_half", p, 1.2, 0.8, 0.1), 1.1) << p;
    EXPECT_GT(period("2bw_v_min", p, 1.2, 0.8, 0), 1.1) << p;
  }
}

// The last rank waits p - 1 forwards for its first message, whatever the order: p - 1 slots of a
// batch are the least that can be idle.
TEST(VShape, ADrainIdlesNoLongerThanItMust) {
  for (const int p : {1, 2, 3, 4, 5, 8, 16}) {
    for (const int m : {p, 2 * p, 2 * p + 1, 4 * p}) {
      const auto over = [&](const std::string& name) {
        Costs costs;
        costs.stages.assign(2 * p, {.forward = 1, .input_grad = 1, .weight_grad = 1});
        return simulate(made(name, p, m), costs, 4).period - 6 * m;
      };
      EXPECT_NEAR(over("zero_bubble_v"), p - 1, 1e-9) << p << " " << m;
      EXPECT_LE(over("v_half"), 3 * p) << p << " " << m;
      EXPECT_LE(over("v_min"), 4 * p) << p << " " << m;
    }
  }
}

TEST(VShape, ARankHasTwoStages) {
  EXPECT_EQ(value_error([] { make_schedule("2bw_v_half", 4, 4); }),
            "stages_per_rank: 1, schedule: 2bw_v_half: rank r has the stages r and num_stages - 1 "
            "- r, so stages_per_rank must be 2");
  EXPECT_EQ(value_error([] { make_schedule("2bw_v", 16, 13, 2); }),
            "num_microbatches: 13, num_stages: 16: 2bw_v needs num_microbatches >= 14");
}

}  // namespace
}  // namespace pd2
