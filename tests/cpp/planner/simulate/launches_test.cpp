// What hosts' launches cost: nothing where devices have work, and the truth where they have not.

#include "core/check.h"
#include "core/schedule/generate.h"
#include "planner/simulate/simulate.h"
#include "raises.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace pd2 {
namespace {

using testing::value_error;

Costs equal_stages(int depth, StageCosts stage) {
  Costs costs;
  costs.stages.assign(depth, stage);
  return costs;
}

const StageCosts kMilliseconds = {
    .forward = 1e-3, .input_grad = 1e-3, .weight_grad = 1e-3, .update = 0.2e-3};

// Clipping: 60 parameters, a norm of each.
constexpr LaunchCosts kSmallReads = {.seconds = 5e-6,
                                     .forward = 20,
                                     .backward = 40,
                                     .update = 10,
                                     .reads = 60,
                                     .read_seconds = 10e-6};

double sum(const IdleTime& idle) { return idle.messages + idle.updates + idle.host; }

TEST(Launches, WithoutCostsTimesAreThoseOfActions) {
  for (const std::string name : {"2bw", "1f1b", "gpipe", "zero_bubble", "pipedream", "chimera"}) {
    const Schedule schedule = make_schedule(name, 4, name == "pipedream" ? 1 : 4);
    StageCosts stage = kMilliseconds;
    stage.recompute = 1e-3;
    Costs costs = equal_stages(4, stage);
    costs.edges.assign(3, {.latency = 1e-4, .bandwidth = 0, .message_bytes = 0});
    const Simulation actions = simulate(schedule, costs, 5);
    const Simulation launched = simulate(schedule, costs, 5, LaunchCosts{});
    EXPECT_NEAR(launched.period, actions.period, 1e-9) << name;
    EXPECT_NEAR(launched.makespan, actions.makespan, 1e-9) << name;
    EXPECT_TRUE(actions.idle.empty());
    for (const IdleTime& idle : launched.idle) EXPECT_NEAR(idle.host, 0, 1e-12) << name;
  }
}

TEST(Launches, IdleTimeIsThePeriodWithoutForwardsAndBackwards) {
  for (const std::string name : {"2bw", "1f1b", "zero_bubble", "chimera"}) {
    for (const bool one_stream : {false, true}) {
      LaunchCosts launches = kSmallReads;
      launches.one_stream = one_stream;
      const Schedule schedule = make_schedule(name, 4, 4);
      const Simulation found = simulate(schedule, equal_stages(4, kMilliseconds), 8, launches);
      for (const IdleTime& idle : found.idle) {
        EXPECT_NEAR(sum(idle), found.period - 4 * 3e-3, 1e-6) << name << one_stream;
      }
    }
  }
}

// The figures of docs/design/schedules.md.
TEST(Launches, NormsThatAreReadBesideTheWorkLeaveNoDeviceIdle) {
  const Schedule schedule = make_schedule("2bw", 4, 4);
  const Simulation found = simulate(schedule, equal_stages(4, kMilliseconds), 8, kSmallReads);
  EXPECT_NEAR(found.period, 12e-3, 1e-9);
  for (const IdleTime& idle : found.idle) EXPECT_NEAR(sum(idle), 0, 1e-9);

  LaunchCosts together = kSmallReads;
  together.one_stream = true;
  const Simulation worse = simulate(schedule, equal_stages(4, kMilliseconds), 8, together);
  // The first two reads wait for what is launched meanwhile. When the second one ends, the device
  // has nothing to do until 58 more and the step's launches are done.
  const double host = 10e-6 + 58 * (5e-6 + 10e-6) + 10 * 5e-6;
  EXPECT_NEAR(worse.idle[0].host, host, 1e-9);
  EXPECT_NEAR(worse.idle[0].updates, 0.2e-3, 1e-9);
  EXPECT_NEAR(worse.period, 12e-3 + host + 0.2e-3, 1e-9);
}

TEST(Launches, ADeviceThatIsFasterThanItsHostWaits) {
  LaunchCosts launches;
  launches.seconds = 10e-6;
  launches.forward = 200;
  launches.backward = 400;
  const Simulation found =
      simulate(make_schedule("2bw", 2, 4), equal_stages(2, kMilliseconds), 8, launches);
  EXPECT_NEAR(found.period, 4 * 600 * 10e-6, 1e-6);
}

TEST(Launches, AnActionEndsNoSoonerThanItsLastLaunch) {
  LaunchCosts launches;
  launches.seconds = 10e-6;
  launches.forward = 300;
  const Simulation found =
      simulate(make_schedule("1f1b", 1, 1), equal_stages(1, kMilliseconds), 1, launches);
  EXPECT_NEAR(found.timeline[0][0].start, 10e-6, 1e-12);
  EXPECT_NEAR(found.timeline[0][0].end, 3e-3, 1e-12);
}

TEST(Launches, AStepOnTheActionsStreamIsNoHostsFault) {
  LaunchCosts launches;
  launches.one_stream = true;
  const Simulation found =
      simulate(make_schedule("2bw", 2, 4), equal_stages(2, kMilliseconds), 8, launches);
  EXPECT_NEAR(found.period, 12.2e-3, 1e-9);
  EXPECT_NEAR(found.idle[1].updates, 0.2e-3, 1e-9);
  for (const IdleTime& idle : found.idle) EXPECT_NEAR(idle.host, 0, 1e-12);
}

TEST(Launches, TheCopiesOfAStageStepWhenBothHaveComeToIt) {
  // chimera, but rank 0 comes to stage 3's update before rank 1 has the other copy's gradients.
  const std::string rank0 = "0F0,3F0,0B0,3B0,0F1,3F1,3B1,3U1,0B1,0U1\n";
  const std::string rank1 = "1F0,2F0,1B0,2B0,2F1,1F1,1B1,2B1,1U1,2U1\n";
  const Schedule schedule = from_text(
      "name: two\npipelines: 2\nstages: 4\nmicrobatches: 2\ndelay: 0\nplacement: 0,1,1,0\n"
      "versions: 1,1,1,1\n[prologue]\n" +
      rank0 + rank1 + "[steady]\n" + rank0 + rank1 + "[epilogue]\n-\n-\n");
  Costs costs = equal_stages(2, kMilliseconds);
  costs.edges = {{.latency = 3e-3, .bandwidth = 0, .message_bytes = 0}};
  const Simulation found = simulate(schedule, costs, 1, LaunchCosts{});
  std::vector<double> complete(schedule.num_stages, 0);
  for (const auto& actions : found.timeline) {
    for (const SimulatedAction& action : actions) {
      double& end = complete[action.stage];
      if (action.kind == ActionKind::kBackward) end = std::max(end, action.end);
    }
  }
  int steps = 0;
  for (const auto& actions : found.timeline) {
    for (const SimulatedAction& action : actions) {
      if (action.kind != ActionKind::kUpdate) continue;
      ++steps;
      EXPECT_GE(action.start, complete[action.stage]);
      EXPECT_GE(action.start, complete[*schedule.twin(action.stage)]) << action.stage;
    }
  }
  EXPECT_EQ(steps, schedule.num_stages);
}

TEST(Launches, CostsAreChecked) {
  const Schedule schedule = make_schedule("2bw", 2, 2);
  const auto error = [&](const LaunchCosts& launches) {
    return value_error([&] { simulate(schedule, equal_stages(2, kMilliseconds), 2, launches); });
  };
  EXPECT_EQ(error({.seconds = -1}), "launches' seconds: -1: must be finite and >= 0");
  EXPECT_EQ(error({.reads = -2}), "launches' reads: -2: must be >= 0");
}

}  // namespace
}  // namespace pd2
