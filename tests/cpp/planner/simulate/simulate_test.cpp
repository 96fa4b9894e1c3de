// What is known in closed form: periods, bubbles and memory of every schedule of equal stages.

#include "planner/simulate/simulate.h"

#include "core/infinity.h"
#include "core/schedule/generate.h"
#include "core/schedule/made_schedules.h"
#include "core/schedule/methods.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

namespace pd2 {
namespace {

// In multiples of a quarter, so that sums are exact and equal times compare equal.
constexpr double kF = 1;
constexpr double kI = 1.25;
constexpr double kW = 0.75;
constexpr double kB = kI + kW;

Costs equal_stages(int d, double f = kF, double i = kI, double w = kW) {
  Costs costs;
  costs.stages.assign(d, {.forward = f, .input_grad = i, .weight_grad = w});
  return costs;
}

Costs with_edges(Costs costs, EdgeCosts edge) {
  costs.edges.assign(costs.stages.size() - 1, edge);
  return costs;
}

double period(const Schedule& schedule, const Costs& costs) {
  return simulate(schedule, costs, 8).period;
}

void expect_period(const Schedule& schedule, double expected) {
  const int d = schedule.num_stages;
  const auto p = static_cast<int>(schedule.ranks.size());
  const Simulation simulation = simulate(schedule, equal_stages(d), 4);
  EXPECT_DOUBLE_EQ(simulation.period, expected)
      << schedule.name << " d " << d << " m " << schedule.num_microbatches << " p " << p;
  const double work = schedule.num_microbatches * (kF + kB) * d / p;
  for (const double bubble : simulation.bubbles) EXPECT_NEAR(bubble, 1 - work / expected, 1e-12);
}

TEST(Simulate, SchedulesWithoutAFlushHaveNoBubbles) {
  for (const Schedule& schedule : testing::made_schedules(8, 16)) {
    const bool is_flushed = schedule.delay[0] == 0 && schedule.num_stages > 1;
    if (is_flushed || find_method(schedule.name)->is_v()) continue;  // those: v_shape_test.cpp
    const int v = schedule.num_stages / static_cast<int>(schedule.ranks.size());
    expect_period(schedule, v * schedule.num_microbatches * (kF + kB));
  }
}

TEST(Simulate, AFlushCostsDepthMinusOneMicrobatches) {
  for (int d = 1; d <= 8; ++d) {
    for (int m = 1; m <= 17; ++m) {
      expect_period(make_schedule("1f1b", d, m), (m + d - 1) * (kF + kB));
      expect_period(make_schedule("gpipe", d, m), (m + d - 1) * (kF + kB));
    }
  }
}

// arXiv 2104.04473, section 2.2: the stages of a rank are shorter, the flush costs p - 1 of them.
TEST(Simulate, InterleavingDividesTheBubbleByTheStagesPerRank) {
  for (int p = 1; p <= 5; ++p) {
    for (int v = 1; v <= 4; ++v) {
      for (int m = p; m <= 4 * p; m += p) {
        const double expected = (v * m + p - 1) * (kF + kB);
        expect_period(make_schedule("interleaved", p * v, m, v), expected);
        expect_period(make_schedule("looped_bfs", p * v, m, v), expected);
      }
    }
  }
}

// arXiv 2401.10241, table 2; its lists are drawn for W no longer than F and I.
TEST(Simulate, ZeroBubbleFillsTheFlushWithWeightGradients) {
  for (int d = 1; d <= 8; ++d) {
    for (int m = d; m <= 2 * d + 1; ++m) {
      const Schedule schedule = make_schedule("zero_bubble", d, m);
      EXPECT_DOUBLE_EQ(period(schedule, equal_stages(d, 1, 1, 1)), 3 * m + (d - 1));
      EXPECT_DOUBLE_EQ(period(schedule, equal_stages(d, 2, 2, 1)), 5 * m + (d - 1) * (2 + 2 - 1));
    }
  }
}

TEST(Simulate, InterleavingDividesWhatZeroBubbleLeavesByTheStagesPerRank) {
  for (int p = 1; p <= 4; ++p) {
    for (int v = 1; v <= 3; ++v) {
      for (int m = p; m <= 3 * p; m += p) {
        const int d = p * v;
        const Schedule schedule = make_schedule("interleaved_zero_bubble", d, m, v);
        EXPECT_DOUBLE_EQ(period(schedule, equal_stages(d, 1, 1, 1)), 3 * v * m + (p - 1));
        EXPECT_DOUBLE_EQ(period(schedule, equal_stages(d, 2, 2, 1)),
                         5 * v * m + (p - 1) * (2 + 2 - 1));
      }
    }
  }
}

TEST(Simulate, ZeroBubbleOfTwiceTheMemoryHasNone) {
  for (int d = 1; d <= 8; ++d) {
    for (int m = 2 * d - 1; m <= 3 * d; ++m) {
      const Schedule schedule = make_schedule("zero_bubble_2p", d, m);
      EXPECT_DOUBLE_EQ(period(schedule, equal_stages(d, 1, 1, 1)), 3 * m) << d << " " << m;
    }
  }
}

// Stage i has d - i in flight, which go to the last stage and back over d - 1 - i edges: stage 0
// loses most, 2c (d - 1) / d per microbatch.
TEST(Simulate, EveryHopOfPlainTwoBwIsExposed) {
  for (const int d : {2, 4, 8, 16}) {
    for (const int m : {d, 2 * d + 3}) {
      const double c = 0.1 * (kF + kB);
      const double expected = m * (kF + kB + 2 * c * (d - 1) / d);
      const Costs costs = with_edges(equal_stages(d), {.latency = c});
      EXPECT_NEAR(period(make_schedule("2bw", d, m), costs), expected, 0.01 * expected) << d;
    }
  }
}

TEST(Simulate, EagerTwoBwHidesHopsOfHalfAMicrobatch) {
  for (const int d : {2, 4, 8, 16}) {
    const Schedule schedule = make_schedule("2bw_eager", d, 2 * d - 1);
    const double work = schedule.num_microbatches * (kF + kB);
    const auto with_hops = [&](double c) { return with_edges(equal_stages(d), {.latency = c}); };
    EXPECT_NEAR(period(schedule, with_hops(0.1 * (kF + kB))), work, 1e-9);
    EXPECT_NEAR(period(schedule, with_hops(0.5 * (kF + kB))), work, 1e-9);
    EXPECT_GT(period(schedule, with_hops(0.6 * (kF + kB))), 1.03 * work);
  }
}

TEST(Simulate, SplitTwoBwHidesHopsOfHalfAWeightGradient) {
  for (const int d : {2, 4, 8, 16}) {
    const Schedule schedule = make_schedule("2bw_split", d, d);
    const double work = schedule.num_microbatches * (kF + kB);
    const auto with_hops = [&](double c) { return with_edges(equal_stages(d), {.latency = c}); };
    EXPECT_NEAR(period(schedule, with_hops(0.1 * (kF + kB))), work, 1e-9);
    EXPECT_NEAR(period(schedule, with_hops(0.5 * kW)), work, 1e-9);
    EXPECT_GT(period(schedule, with_hops(1.5 * kW)), 1.03 * work);
  }
}

TEST(Simulate, TheSlowestStageGivesThePace) {
  const int d = 6;
  for (int slowest = 0; slowest < d; ++slowest) {
    Costs costs = equal_stages(d);
    costs.stages[slowest].forward = 1.5;
    costs.stages[slowest].weight_grad = 1.25;
    costs.stages[(slowest + 2) % d].forward = 0.5;
    const Schedule schedule = make_schedule("2bw_eager", d, 16);
    const Simulation simulation = simulate(schedule, costs, 4);
    EXPECT_DOUBLE_EQ(simulation.period, 16 * 4.0) << slowest;
    for (int stage = 0; stage < d; ++stage) {
      const StageCosts& cost = costs.stages[stage];
      const double share = (cost.forward + cost.input_grad + cost.weight_grad) / 4.0;
      EXPECT_NEAR(simulation.bubbles[stage], 1 - share, 1e-12);
    }
  }
}

// Stage i needs its update m - (d - 1 - i) microbatches after its last backward: stage 0 first.
TEST(Simulate, UpdatesHaveTheTimeUntilTheirVersionIsRead) {
  const int d = 4;
  const int m = 6;
  const Schedule schedule = make_schedule("2bw", d, m);
  for (int i = 0; i < d; ++i) {
    Costs costs = equal_stages(d);
    const double slack = (m - (d - 1 - i)) * (kF + kB);
    costs.stages[i].all_reduce = 0.25 * slack;
    costs.stages[i].update = 0.75 * slack;
    EXPECT_DOUBLE_EQ(period(schedule, costs), m * (kF + kB)) << i;
    EXPECT_NEAR(simulate(schedule, costs, 4).bubbles[i], 0, 1e-12) << i;
    costs.stages[i].update = 0.75 * slack + 0.5 + kF + kB;
    EXPECT_GT(period(schedule, costs), m * (kF + kB) + 0.5) << i;
  }
}

TEST(Simulate, AnUpdateThatTheNextForwardReadsIsWork) {
  Costs costs = equal_stages(4);
  const double without = period(make_schedule("1f1b", 4, 8), costs);
  for (StageCosts& stage : costs.stages) stage.update = 0.5;
  EXPECT_DOUBLE_EQ(period(make_schedule("1f1b", 4, 8), costs), without + 0.5);
  for (StageCosts& stage : costs.stages) stage.all_reduce = 0.25;
  EXPECT_DOUBLE_EQ(period(make_schedule("1f1b", 4, 8), costs), without + 0.75);
}

TEST(Simulate, ALinkBoundsThePeriodFromBelow) {
  const int d = 4;
  const int m = 8;
  for (const std::string& name : schedule_names()) {
    if (name == "pipedream") continue;
    const Schedule schedule = make_schedule(name, d, m, testing::least_stages_per_rank(name));
    Costs costs = with_edges(equal_stages(d), {});
    EdgeCosts& edge = costs.edges[find_method(name)->is_v() ? 0 : 1];  // between two ranks
    edge = {.bandwidth = 100, .message_bytes = 1000};                  // 10 seconds a message
    EXPECT_GE(period(schedule, costs), 10.0 * m) << name;
    for (const double free : {0.0, kInfinity}) {
      edge.bandwidth = free;
      EXPECT_EQ(period(schedule, costs), period(schedule, equal_stages(d))) << name;
    }
  }
  // Eager 2bw has enough in flight for this link to never rest; latency does not occupy it.
  Costs costs = with_edges(equal_stages(8), {});
  costs.edges[0] = {.latency = 1, .bandwidth = 100, .message_bytes = 1000};
  EXPECT_DOUBLE_EQ(period(make_schedule("2bw_eager", 8, 15), costs), 10.0 * 15);
}

TEST(Simulate, AnEdgeWithinARankIsFree) {
  const EdgeCosts slow = {.latency = 100, .bandwidth = 1, .message_bytes = 1000};
  const Costs costs = with_edges(equal_stages(4), slow);
  const Schedule schedule = make_schedule("looped_bfs", 4, 3, 4);  // all stages on one rank
  EXPECT_DOUBLE_EQ(simulate(schedule, costs, 2).makespan, 2 * 4 * 3 * (kF + kB));
}

TEST(Simulate, PipedreamUpdatesAfterEveryMicrobatch) {
  for (int d = 1; d <= 16; ++d) {
    EXPECT_DOUBLE_EQ(period(make_schedule("pipedream", d, 1), equal_stages(d)), kF + kB) << d;
  }
}

// The table of arXiv 2006.09503, section 3.3: 2bw holds two versions and at most d microbatches,
// gpipe one and m, 1f1b one and at most min(d, m), pipedream's stage 0 d versions and d
// microbatches.
TEST(Simulate, PeakMemoryIsThePapers) {
  const double weights = 1000;
  const double gradients = 500;
  const double state = 2000;
  const double activations = 7;
  const auto peak = [&](const std::string& name, int d, int m) {
    Costs costs = equal_stages(d);
    for (StageCosts& stage : costs.stages) {
      stage.weight_bytes = weights;
      stage.gradient_bytes = gradients;
      stage.state_bytes = state;
      stage.activation_bytes = activations;
    }
    std::vector<double> bytes = simulate(make_schedule(name, d, m), costs, 4 + d).peak_bytes;
    for (double& rank : bytes) rank -= gradients + state;
    return bytes;
  };
  for (int d = 1; d <= 6; ++d) {
    for (int i = 0; i < d; ++i) {
      EXPECT_EQ(peak("pipedream", d, 1)[i], (d - i) * weights + (d - i) * activations);
    }
    for (int m = 1; m <= 2 * d; ++m) {
      for (int i = 0; i < d; ++i) {
        EXPECT_EQ(peak("gpipe", d, m)[i], weights + m * activations);
        EXPECT_EQ(peak("1f1b", d, m)[i], weights + std::min(d - i, m) * activations);
        if (m < d) continue;
        EXPECT_EQ(peak("2bw", d, m)[i], 2 * weights + (d - i) * activations);
        EXPECT_EQ(peak("zero_bubble", d, m)[i], weights + d * activations);
      }
    }
  }
}

TEST(Simulate, MemoryRisesAtAForwardsStartAndFallsAtABackwardsEnd) {
  Costs costs = equal_stages(1, 1, 2, 3);
  costs.stages[0].activation_bytes = 10;
  costs.stages[0].weight_bytes = 100;
  const Schedule whole = make_schedule("2bw", 1, 1);
  const Schedule split = make_schedule("2bw_split", 1, 1);
  for (const Schedule& schedule : {whole, split}) {
    const Simulation simulation = simulate(schedule, costs, 2);
    const std::vector<MemoryStep> steps =
        memory_over_time(schedule, costs, simulation.timeline[0], 0);
    const std::vector<std::pair<double, double>> expected = {
        {0, 200}, {0, 210}, {6, 200}, {6, 210}, {12, 200}};
    ASSERT_EQ(steps.size(), expected.size());
    for (std::size_t i = 0; i < steps.size(); ++i) {
      EXPECT_EQ(std::pair(steps[i].time, steps[i].bytes), expected[i]) << i;
    }
    EXPECT_EQ(simulation.peak_bytes, std::vector<double>{210});
  }
}

TEST(Simulate, ARecomputedForwardRunsWhileTheGradientIsUnderWay) {
  Costs costs = equal_stages(2, 1, 1, 1);
  for (StageCosts& stage : costs.stages) {
    stage.recompute = 1;
    stage.activation_bytes = 100;
    stage.input_bytes = 10;
  }
  // Rank 0: F 0-1, R 1-2, B 5-7. Rank 1: F 1-2, R 2-3, B 3-5.
  const Simulation flushed = simulate(make_schedule("gpipe", 2, 1), costs, 1);
  EXPECT_EQ(flushed.makespan, 7);
  const SimulatedAction& again = flushed.timeline[0][1];
  EXPECT_EQ(again.kind, ActionKind::kRecompute);
  EXPECT_EQ(again.start, 1);
  EXPECT_EQ(again.end, 2);
  EXPECT_EQ(period(make_schedule("2bw", 2, 4), costs), 4 * (1 + 1 + 2));
  EXPECT_EQ(period(make_schedule("1f1b", 2, 4), costs), 5 * (1 + 2) + 4);
  // Two inputs in flight on rank 0, and the activations of the one that is recomputed.
  const Simulation simulation = simulate(make_schedule("2bw", 2, 4), costs, 4);
  EXPECT_EQ(simulation.peak_bytes[0], 2 * 10 + 100);
  EXPECT_EQ(simulation.peak_bytes[1], 10 + 100);
}

TEST(Simulate, WhatIsInFlightDoesNotDependOnTime) {
  for (const Schedule& schedule : testing::made_schedules(6, 12)) {
    const int d = schedule.depth();
    const Simulation simulation = simulate(schedule, equal_stages(d), d + 3);
    for (int stage = 0; stage < schedule.num_stages; ++stage) {
      EXPECT_EQ(simulation.most_in_flight[stage], max_in_flight(schedule, stage)) << schedule.name;
    }
  }
}

TEST(Simulate, ShortRunsReportTheSamePeriod) {
  for (const Schedule& schedule : testing::made_schedules(5, 10)) {
    const Costs costs = equal_stages(schedule.depth());
    const double expected = period(schedule, costs);
    EXPECT_DOUBLE_EQ(simulate(schedule, costs, 1).period, expected) << schedule.name;
    EXPECT_DOUBLE_EQ(simulate(schedule, costs, 30).period, expected) << schedule.name;
  }
}

// arXiv 2107.06925, table 2 and section 3.3: with N = m microbatches, D = d and units of D, the
// critical path has D forwards and 2 D - 2 backwards, hence D - 2 idle slots where F = B (of any
// number of units: the next one fills all others), and (D - 2) / (3 N / 2 + D - 2) of the time
// where B = 2 F and N = D.
TEST(Simulate, ChimerasBubblesAreThePapers) {
  const auto bubble = [](const Simulation& simulation) {
    for (const double each : simulation.bubbles) EXPECT_NEAR(each, simulation.bubbles[0], 1e-12);
    return simulation.bubbles[0];
  };
  for (int d = 2; d <= 12; d += 2) {
    for (int units = 1; units <= 4; ++units) {
      const double n = units * d;
      const Schedule schedule = make_schedule("chimera", d, units * d);
      const Simulation equal = simulate(schedule, equal_stages(d, 1, 0.5, 0.5), 4);
      EXPECT_DOUBLE_EQ(equal.period, 2 * n + d - 2);
      EXPECT_NEAR(bubble(equal), (d - 2) / (2 * n + d - 2), 1e-12);
    }
    const Simulation longer = simulate(make_schedule("chimera", d, d), equal_stages(d, 1, 1, 1), 4);
    EXPECT_DOUBLE_EQ(longer.period, d + 2 * (2 * d - 2));
    EXPECT_NEAR(bubble(longer), (d - 2) / (1.5 * d + d - 2), 1e-12);
  }
}

// Section 3.5: where B = 2 F, concatenated units leave bubbles between them; with forwards doubled
// there are none but a batch's first and last: d - 2 slots as long as a backward, and a quarter of
// that less, since of two forwards in a slot the first one's output leaves when it is done.
TEST(Simulate, DoubledForwardsLeaveNoBubblesBetweenUnits) {
  for (int d = 2; d <= 12; d += 2) {
    for (int units = 1; units <= 4; ++units) {
      const int m = units * 2 * d;
      const Costs costs = equal_stages(d, 1, 1, 1);
      const double work = 3 * m;
      const double doubled = simulate(make_schedule("chimera_doubled", d, m), costs, 4).period;
      const double plain = simulate(make_schedule("chimera", d, m), costs, 4).period;
      EXPECT_DOUBLE_EQ(doubled, work + 1.5 * (d - 2));
      EXPECT_GE(plain, doubled) << d << " " << m;
      if (d > 2) {
        EXPECT_GT(plain, doubled) << d << " " << m;
      }
    }
  }
}

// Section 3.2, table 2: from d / 2 + 1 microbatches a rank to d, where 1f1b has from 1 to d; with
// forwards doubled up to twice as many.
TEST(Simulate, ChimeraBalancesWhatRanksHaveInFlight) {
  const auto most_in_flight = [](const std::string& name, int d, int m) {
    Costs costs = equal_stages(d);
    for (StageCosts& stage : costs.stages) stage.activation_bytes = 1;
    return simulate(make_schedule(name, d, m), costs, 4).peak_bytes;
  };
  EXPECT_EQ(most_in_flight("chimera", 4, 4), (std::vector<double>{3, 4, 4, 3}));
  EXPECT_EQ(most_in_flight("chimera", 8, 8), (std::vector<double>{5, 6, 7, 8, 8, 7, 6, 5}));
}

TEST(Simulate, CopiesUpdateTogether) {
  Costs costs = equal_stages(2, 1, 0.5, 0.5);
  for (StageCosts& stage : costs.stages) {
    stage.all_reduce = 3;
    stage.update = 1;
  }
  // The second pipeline after the first one, so that rank 0 has done its part a second earlier.
  const Schedule schedule = from_text(
      "name: one after the other\npipelines: 2\nstages: 4\nmicrobatches: 1\ndelay: 0\n"
      "placement: 0,1,1,0\nversions: 1,1,1,1\n"
      "[prologue]\n0F0,0B0,3F0,3B0,3U0,0U0\n1F0,1B0,2F0,2B0,1U0,2U0\n"
      "[steady]\n0F0,0B0,3F0,3B0,3U0,0U0\n1F0,1B0,2F0,2B0,1U0,2U0\n"
      "[epilogue]\n-\n-\n");
  const Simulation simulation = simulate(schedule, costs, 1);
  EXPECT_EQ(simulation.timeline[0][3].end, 6);
  EXPECT_EQ(simulation.timeline[1][3].end, 7);
  for (const auto& actions : simulation.timeline) {
    EXPECT_EQ(std::pair(actions[4].start, actions[4].end), std::pair(7.0, 11.0));
    EXPECT_EQ(std::pair(actions[5].start, actions[5].end), std::pair(11.0, 15.0));
  }
}

TEST(Simulate, LargeSchedules) {
  for (const int v : {1, 4}) {
    const Schedule schedule = make_schedule("interleaved", 64 * v, 512, v);
    const Simulation simulation = simulate(schedule, equal_stages(64 * v), 4);
    EXPECT_DOUBLE_EQ(simulation.period, (512 * v + 63) * (kF + kB));
  }
}

TEST(Simulate, StagesThatTakeNoTimeHaveNoPeriod) {
  const Simulation simulation = simulate(make_schedule("2bw", 3, 4), equal_stages(3, 0, 0, 0), 4);
  EXPECT_EQ(simulation.makespan, 0);
  EXPECT_EQ(simulation.period, 0);
  EXPECT_EQ(simulation.bubbles, (std::vector<double>{0, 0, 0}));
}

}  // namespace
}  // namespace pd2
