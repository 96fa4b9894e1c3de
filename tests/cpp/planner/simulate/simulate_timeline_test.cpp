// Is the timeline one that ranks and links could have gone through? And what is refused.

#include "core/check.h"
#include "core/schedule/errors.h"
#include "core/schedule/generate.h"
#include "core/schedule/made_schedules.h"
#include "core/schedule/methods.h"
#include "planner/simulate/simulate.h"
#include "raises.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <tuple>

namespace pd2 {
namespace {

using testing::value_error;
using enum ActionKind;

constexpr int kNumBatches = 4;
constexpr double kRounding = 1e-9;

Costs random_costs(int d, std::mt19937& random) {
  std::uniform_real_distribution<double> uniform(0, 1);
  Costs costs;
  for (int stage = 0; stage < d; ++stage) {
    costs.stages.push_back({.forward = uniform(random),
                            .input_grad = uniform(random),
                            .weight_grad = uniform(random),
                            .all_reduce = uniform(random) / 4,
                            .update = uniform(random) / 4});
  }
  for (int edge = 0; edge + 1 < d; ++edge) {
    costs.edges.push_back(
        {.latency = uniform(random) / 2, .bandwidth = 10, .message_bytes = 10 * uniform(random)});
  }
  return costs;
}

void add_skips(Costs& costs, std::mt19937& random) {
  std::uniform_real_distribution<double> uniform(0, 1);
  const auto d = static_cast<int>(costs.stages.size());
  for (int from = 0; from < d; ++from) {
    for (int to = from + 2; to < d; ++to) {
      if (random() % 2 == 0) continue;
      costs.skips.push_back({from, to, {uniform(random) / 2, 10, 30 * uniform(random)}});
    }
  }
  std::ranges::shuffle(costs.skips, random);
}

double work(const StageCosts& cost, ActionKind kind) {
  const std::map<ActionKind, double> seconds = {{kForward, cost.forward},
                                                {kBackward, cost.input_grad + cost.weight_grad},
                                                {kInputGrad, cost.input_grad},
                                                {kWeightGrad, cost.weight_grad},
                                                {kUpdate, cost.all_reduce + cost.update}};
  return seconds.at(kind);
}

// Looks at a timeline from outside: it knows when each action began and ended and nothing else.
class TimelineCheck {
 public:
  TimelineCheck(const Schedule& schedule, const Costs& costs, const Simulation& simulation)
      : schedule_(schedule), costs_(costs), simulation_(simulation) {
    for (const auto& actions : simulation.timeline) {
      for (std::size_t i = 0; i < actions.size(); ++i) {
        const SimulatedAction& action = actions[i];
        // B gives what I gives, at its end.
        const ActionKind kind = action.kind == kBackward ? kInputGrad : action.kind;
        const bool is_new =
            when_.emplace(key(action.stage, kind, action), Place{&action, i}).second;
        EXPECT_TRUE(is_new);
        makespan_ = std::max(makespan_, action.end);
      }
    }
  }

  void check() {
    EXPECT_EQ(simulation_.makespan, makespan_);
    for (std::size_t rank = 0; rank < simulation_.timeline.size(); ++rank) {
      double busy = 0;
      double expected = 0;
      for (std::size_t i = 0; i < simulation_.timeline[rank].size(); ++i) {
        const SimulatedAction& action = simulation_.timeline[rank][i];
        ASSERT_GE(action.start, 0);
        ASSERT_NEAR(action.end - action.start, work(cost_of(action.stage), action.kind), kRounding);
        ASSERT_EQ(schedule_.placement[action.stage], static_cast<int>(rank));
        ASSERT_NEAR(action.start, earliest_start(rank, i), kRounding);
        check_order_within_stage(action);
        busy += is_beside(action) ? 0 : action.end - action.start;
      }
      for (int stage = 0; stage < schedule_.num_stages; ++stage) {
        if (schedule_.placement[stage] != static_cast<int>(rank)) continue;
        const StageCosts& cost = cost_of(stage);
        const double batch = schedule_.num_microbatches * (cost.forward + work(cost, kBackward)) +
                             (schedule_.num_versions[stage] > 1 ? 0 : work(cost, kUpdate));
        expected += kNumBatches * batch;
      }
      ASSERT_NEAR(busy, expected, kRounding);
      ASSERT_GE(simulation_.makespan, expected - kRounding);
      ASSERT_GE(simulation_.period, expected / kNumBatches - kRounding);
      ASSERT_GE(simulation_.bubbles[rank], -kRounding);
      ASSERT_LT(simulation_.bubbles[rank], 1);
    }
    check_chain_of_one_microbatch();
  }

 private:
  using Key = std::tuple<int, ActionKind, int, int>;
  struct Place {
    const SimulatedAction* action;
    std::size_t index;  // in its rank's list
  };

  static Key key(int stage, ActionKind kind, const SimulatedAction& of) {
    return {stage, kind, of.batch, of.microbatch};
  }

  const StageCosts& cost_of(int stage) const { return costs_.stages[stage % schedule_.depth()]; }
  bool are_apart(int a, int b) const { return schedule_.placement[a] != schedule_.placement[b]; }
  const EdgeCosts& edge_between(int a, int b) const {
    const int from = std::min(a, b) % schedule_.depth();
    const int to = std::max(a, b) % schedule_.depth();
    if (to == from + 1) return costs_.edges[from];
    return std::ranges::find_if(
               costs_.skips,
               [&](const SkipCosts& skip) { return skip.from == from && skip.to == to; })
        ->edge;
  }
  double transfer(int a, int b) const {
    const EdgeCosts& edge = edge_between(a, b);
    return are_apart(a, b) ? edge.message_bytes / edge.bandwidth : 0;
  }
  double latency(int a, int b) const { return are_apart(a, b) ? edge_between(a, b).latency : 0; }

  // An update for which only the forward that reads its version waits.
  bool is_beside(const SimulatedAction& action) const {
    return action.kind == kUpdate && schedule_.num_versions[action.stage] > 1;
  }

  // Of a pipeline: there may be two, one after the other.
  bool is_begin(int stage) const { return stage == 0 || stage == schedule_.depth(); }
  bool is_end(int stage) const { return is_begin(stage + 1) || stage + 1 == schedule_.num_stages; }

  // The stages whose messages an action waits for.
  std::vector<int> senders(const SimulatedAction& action) const {
    std::vector<int> stages;
    if (action.kind == kUpdate || action.kind == kWeightGrad) return stages;
    const bool is_forward = action.kind == kForward;
    const int copies = action.stage / schedule_.depth() * schedule_.depth();
    if (is_forward && !is_begin(action.stage)) stages.push_back(action.stage - 1);
    if (!is_forward && !is_end(action.stage)) stages.push_back(action.stage + 1);
    for (const SkipCosts& skip : costs_.skips) {
      if (is_forward && skip.to + copies == action.stage) stages.push_back(skip.from + copies);
      if (!is_forward && skip.from + copies == action.stage) stages.push_back(skip.to + copies);
    }
    return stages;
  }
  static ActionKind message_kind(const SimulatedAction& action) {
    return action.kind == kForward ? kForward : kInputGrad;
  }

  // When the message that the action sends to the stage is there.
  double arrival(const SimulatedAction& action, int to) {
    const int from = action.stage;
    const double sent = action.end;
    if (!are_apart(from, to)) return sent;
    // Behind the messages that took the same way before.
    double& behind = left_link_[{key(from, message_kind(action), action), to}];
    if (behind == 0) {
      double previous = 0;
      const bool is_first = action.batch == 0 && action.microbatch == 0;
      if (!is_first) {
        const int m = schedule_.num_microbatches;
        const int before = action.batch * m + action.microbatch - 1;
        const Place& place = when_.at({from, message_kind(action), before / m, before % m});
        previous = arrival(*place.action, to) - latency(from, to);
      }
      behind = std::max(sent, previous) + transfer(from, to);
    }
    return behind + latency(from, to);
  }

  // When the rank can begin its index-th action, as far as the rank itself goes.
  double free_after(int rank, std::size_t index) {
    if (index == 0) return 0;
    const SimulatedAction& previous = simulation_.timeline[rank][index - 1];
    if (is_beside(previous)) return previous.start;
    return previous.end;
  }

  double earliest_start(int rank, std::size_t index) {
    const SimulatedAction& action = simulation_.timeline[rank][index];
    double start = free_after(rank, index);
    for (const int from : senders(action)) {
      const Place& sent = when_.at(key(from, message_kind(action), action));
      start = std::max(start, arrival(*sent.action, action.stage));
    }
    if (action.kind == kUpdate && schedule_.num_pipelines == 2) {
      const int d = schedule_.depth();
      const int twin = action.stage < d ? action.stage + d : action.stage - d;
      const Place& others = when_.at(key(twin, kUpdate, action));
      start = std::max(start, free_after(schedule_.placement[twin], others.index));
    }
    const int m = schedule_.num_microbatches;
    if (action.kind == kForward && action.version > 0) {
      start =
          std::max(start, when_.at({action.stage, kUpdate, action.version - 1, m - 1}).action->end);
    }
    if (is_beside(action) && action.batch > 0) {
      start =
          std::max(start, when_.at({action.stage, kUpdate, action.batch - 1, m - 1}).action->end);
    }
    return start;
  }

  void check_order_within_stage(const SimulatedAction& action) const {
    const auto end = [&](ActionKind kind) {
      return when_.at(key(action.stage, kind, action)).action->end;
    };
    if (action.kind == kForward && action.version > 0) {
      const Key update = {action.stage, kUpdate, action.version - 1,
                          schedule_.num_microbatches - 1};
      const SimulatedAction& made_by = *when_.at(update).action;
      EXPECT_EQ(made_by.version, action.version);
      EXPECT_GE(action.start, made_by.end);
    }
    if (action.kind == kBackward || action.kind == kInputGrad) {
      EXPECT_GE(action.start, end(kForward));
    }
    if (action.kind == kWeightGrad || action.kind == kUpdate) {
      EXPECT_GE(action.start, end(kInputGrad));
    }
    if (action.kind == kUpdate && when_.contains(key(action.stage, kWeightGrad, action))) {
      EXPECT_GE(action.start, end(kWeightGrad));
    }
    if (action.kind != kUpdate) {
      const int delay = schedule_.delay_at(action.stage, action.microbatch);
      EXPECT_EQ(action.version, std::max(action.batch - delay, 0));
    }
  }

  void check_chain_of_one_microbatch() const {
    double chain = work(costs_.stages[0], kUpdate);
    for (int stage = 0; stage < schedule_.depth(); ++stage) {
      const StageCosts& cost = costs_.stages[stage];
      chain += cost.forward + cost.input_grad;
      if (stage > 0) chain += 2 * (transfer(stage - 1, stage) + latency(stage - 1, stage));
    }
    EXPECT_GE(simulation_.makespan, chain - kRounding);
  }

  const Schedule& schedule_;
  const Costs& costs_;
  const Simulation& simulation_;
  std::map<Key, Place> when_;
  std::map<std::pair<Key, int>, double> left_link_;  // by action and receiver
  double makespan_ = 0;
};

TEST(SimulateTimeline, EveryActionBeginsAsSoonAsItsRankAndItsMessageAllow) {
  std::mt19937 random(1);
  for (const Schedule& schedule : testing::made_schedules(5, 9)) {
    SCOPED_TRACE(to_text(schedule));
    Costs costs = random_costs(schedule.depth(), random);
    if (schedule.num_microbatches % 2 == 1) add_skips(costs, random);
    TimelineCheck(schedule, costs, simulate(schedule, costs, kNumBatches)).check();
    if (HasFailure()) return;
  }
}

TEST(SimulateTimeline, ThePeriodIsThatOfALongRun) {
  std::mt19937 random(2);
  for (const Schedule& schedule : testing::made_schedules(5, 9)) {
    const Costs costs = random_costs(schedule.depth(), random);
    const double expected = simulate(schedule, costs, 300).period;
    EXPECT_NEAR(simulate(schedule, costs, 1).period, expected, 0.01 * expected) << schedule.name;
  }
}

TEST(SimulateTimeline, OfTwoStages) {
  Costs costs;
  costs.stages.assign(2, {.forward = 1, .input_grad = 1, .weight_grad = 1, .update = 0.5});
  costs.edges = {{.latency = 0.25, .bandwidth = 4, .message_bytes = 8}};  // 2 seconds on the link
  const Simulation simulation = simulate(make_schedule("gpipe", 2, 2), costs, 1);
  const auto times = [](const std::vector<SimulatedAction>& actions) {
    std::vector<std::pair<double, double>> pairs;
    for (const SimulatedAction& action : actions) pairs.emplace_back(action.start, action.end);
    return pairs;
  };
  using Times = std::vector<std::pair<double, double>>;
  // F0 arrives at 1 + 2 + 0.25; F1 leaves when the link is free, at 3, and arrives at 5.25.
  EXPECT_EQ(times(simulation.timeline[1]),
            (Times{{3.25, 4.25}, {5.25, 6.25}, {6.25, 8.25}, {8.25, 10.25}, {10.25, 10.75}}));
  EXPECT_EQ(times(simulation.timeline[0]),
            (Times{{0, 1}, {1, 2}, {10.5, 12.5}, {12.5, 14.5}, {14.5, 15}}));
  EXPECT_EQ(simulation.makespan, 15);
}

// What stage 2 reads of stage 0 takes the link between these two, 3 + 0.5 seconds of it.
TEST(SimulateTimeline, ASkipTakesItsOwnLink) {
  Costs costs;
  costs.stages.assign(3, {.forward = 1, .input_grad = 1, .weight_grad = 1});
  costs.skips = {{0, 2, {.latency = 0.5, .bandwidth = 4, .message_bytes = 12}}};
  const Schedule schedule = make_schedule("gpipe", 3, 2);
  const auto starts = [&](int rank) {
    std::vector<double> times;
    const Simulation simulation = simulate(schedule, costs, 1);
    for (const SimulatedAction& action : simulation.timeline[rank]) times.push_back(action.start);
    return times;
  };
  // Stage 1 waits for its own edges alone. The second message leaves at 4, when the link is free.
  EXPECT_EQ(starts(1), (std::vector<double>{1, 2, 10.5, 12.5, 14.5}));
  EXPECT_EQ(starts(2), (std::vector<double>{4.5, 7.5, 8.5, 10.5, 12.5}));
  EXPECT_EQ(starts(0), (std::vector<double>{0, 1, 14, 17, 19}));
}

TEST(SimulateTimeline, ASkipBoundsThePeriodFromBelow) {
  for (const std::string& name : schedule_names()) {
    if (name == "pipedream") continue;
    Costs costs;
    costs.stages.assign(4, {.forward = 1, .input_grad = 1, .weight_grad = 1});
    const Schedule schedule = make_schedule(name, 4, 8, testing::least_stages_per_rank(name));
    const double without = simulate(schedule, costs, 1).period;
    const int to = find_method(name)->is_v() ? 2 : 3;                    // on another rank
    costs.skips = {{0, to, {.bandwidth = 100, .message_bytes = 1000}}};  // 10 seconds a message
    const double share = schedule.num_pipelines == 2 ? 0.5 : 1;
    EXPECT_GE(simulate(schedule, costs, 1).period, share * 8 * 10) << name;
    costs.skips.front().edge.bandwidth = 0;  // unlimited
    EXPECT_EQ(simulate(schedule, costs, 1).period, without) << name;
  }
}

TEST(SimulateTimeline, ADeadlockSaysWhatEveryRankWaitsFor) {
  Schedule schedule = make_schedule("1f1b", 3, 2);
  schedule.ranks[0].prologue = {
      {0, kForward, 0}, {0, kBackward, 0}, {0, kForward, 1}, {0, kBackward, 1}, {0, kUpdate, 1}};
  schedule.ranks[1].prologue = {
      {1, kForward, 0}, {1, kForward, 1}, {1, kBackward, 0}, {1, kBackward, 1}, {1, kUpdate, 1}};
  Costs costs;
  costs.stages.resize(3);
  EXPECT_THROW(simulate(schedule, costs, 1), Deadlock);
  const std::string text = value_error([&] { simulate(schedule, costs, 1); });
  for (const std::string part :
       {"deadlock: expected every rank to finish, found 3 of 3 waiting:",
        "rank 0 waits in 0B0 (prologue, microbatch 0 of batch 0) for the gradient of stage 1",
        "rank 1 waits in 1F1 (prologue, microbatch 1 of batch 0) for the output of stage 0",
        "rank 2 waits in 2F1 (prologue, microbatch 1 of batch 0) for the output of stage 1",
        ">0B0<", ">1F1<", ">2F1<"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << "\nin:\n" << text;
  }
}

TEST(SimulateTimeline, BadCostsNameTheRuleAndTheValues) {
  const Schedule schedule = make_schedule("1f1b", 3, 2);
  const auto refusal = [&](auto change) {
    Costs costs;
    costs.stages.resize(3);
    costs.edges.resize(2);
    change(costs);
    return value_error([&] { simulate(schedule, costs, 1); });
  };
  EXPECT_EQ(refusal([](Costs&) {}), "");
  EXPECT_EQ(refusal([](Costs& costs) { costs.edges.clear(); }), "");
  const double nan = std::nan("");
  const std::string rule = ": a cost must be finite and >= 0";
  EXPECT_EQ(refusal([](Costs& costs) { costs.stages[2].forward = -1; }), "forward[2]: -1" + rule);
  EXPECT_EQ(refusal([&](Costs& costs) { costs.stages[1].update = nan; }), "update[1]: nan" + rule);
  EXPECT_EQ(refusal([](Costs& costs) { costs.edges[1].latency = -0.5; }),
            "latency[1]: -0.5" + rule);
  EXPECT_EQ(refusal([](Costs& costs) { costs.edges[0].bandwidth = -3; }),
            "bandwidth[0]: -3: a bandwidth must be >= 0 (0: unlimited)");
  Costs costs;
  costs.stages.resize(3);
  Schedule misplaced = schedule;
  misplaced.ranks[0].steady[0].stage = 7;
  const std::string text = value_error([&] { simulate(misplaced, costs, 1); });
  EXPECT_NE(text.find("every action's stage exists"), std::string::npos) << text;
}

}  // namespace
}  // namespace pd2
