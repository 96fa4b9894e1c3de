// Receives are posted where no wait for the device can last for ever, and no earlier.

#include "core/schedule/receives.h"

#include "core/schedule/generate.h"
#include "core/schedule/validate.h"
#include "made_schedules.h"
#include "raises.h"
#include "receive_execution.h"
#include "sanitized.h"
#include "schedule_mutations.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace pd2 {
namespace {

using testing::Drains;
using testing::made_schedules;
using testing::Posting;
using testing::ReceiveExecution;
using testing::ScheduleMutator;
using testing::value_error;

constexpr Drains kAlways = {.in_actions = 1, .between_batches = 1};
constexpr Drains kBetweenBatches = {.in_actions = 0, .between_batches = 1};

// Those of a chain: each stage's with the next.
std::vector<StageEdge> chain_edges(int depth) {
  std::vector<StageEdge> edges;
  for (int stage = 0; stage + 1 < depth; ++stage) edges.push_back({stage, stage + 1});
  return edges;
}

std::string execution(const Schedule& schedule, Posting posting, Drains drains, unsigned seed = 1,
                      const std::vector<StageEdge>& extra = {}) {
  std::vector<StageEdge> edges = chain_edges(schedule.depth());
  edges.insert(edges.end(), extra.begin(), extra.end());
  return ReceiveExecution(schedule, edges, posting, seed).run({1, 4, 2}, drains);
}

std::string named(const Schedule& schedule) {
  return schedule.name + " d=" + std::to_string(schedule.depth()) +
         " m=" + std::to_string(schedule.num_microbatches) +
         " ranks=" + std::to_string(schedule.ranks.size());
}

// "1F0 2B-1": the gradients of microbatch -1, from stage 2, with the sends of 1F0; "1F0->" after
// them; "<-1F0": before it waits for its own messages.
std::string text(const Schedule& schedule, const ReceivePlan& plan, int rank, ListKind list) {
  std::string text;
  for (const EarlyReceive& each : plan.of(rank, list)) {
    const Action& action = actions(schedule.ranks[rank], list).at(each.action);
    const char kind = each.receive.from < each.receive.to ? 'F' : 'B';
    text += (text.empty() ? "" : ", ") + std::string(each.moment == Moment::kBefore ? "<-" : "") +
            to_string(action) + (each.moment == Moment::kAfterSends ? "-> " : " ") +
            std::to_string(each.receive.from) + kind + std::to_string(each.receive.microbatch);
  }
  return text;
}

TEST(Receives, ArePostedWhereTheNextActionWouldComeTooLate) {
  // Neighbours that send to each other: rank 0 in F1, rank 1 in B0. Rank 1's last gradients are
  // consumed in the next batch, and sent in this one.
  const Schedule two = make_schedule("2bw", 2, 3);
  const ReceivePlan of_two = plan_receives(two, chain_edges(2));
  EXPECT_EQ(text(two, of_two, 0, ListKind::kPrologue), "0F1 1B0, 0F2 1B1, 0B1 1B2");
  EXPECT_EQ(text(two, of_two, 0, ListKind::kSteady), "0F1 1B0, 0F2 1B1, 0B1 1B2");
  EXPECT_EQ(text(two, of_two, 0, ListKind::kEpilogue), "");
  EXPECT_EQ(text(two, of_two, 1, ListKind::kPrologue), "1B0-> 0F1, 1B1-> 0F2");
  EXPECT_EQ(text(two, of_two, 1, ListKind::kSteady), "1B0-> 0F1, 1B1-> 0F2");

  const Schedule three = make_schedule("2bw", 3, 3);
  const ReceivePlan of_three = plan_receives(three, chain_edges(3));
  EXPECT_EQ(text(three, of_three, 0, ListKind::kPrologue), "0B0-> 1B1");
  EXPECT_EQ(text(three, of_three, 0, ListKind::kSteady), "0F1-> 1B-1, 0F2-> 1B0, 0B0-> 1B1");
  EXPECT_EQ(text(three, of_three, 1, ListKind::kSteady),
            "1B-1 2B0, 1B-1 0F1, 1B0 0F2, 1B0-> 2B1, 1B1 2B2");
  EXPECT_EQ(text(three, of_three, 2, ListKind::kSteady), "");
}

TEST(Receives, ArePostedWhenConsumedWhereThatWillDo) {
  for (const Schedule& schedule : made_schedules(4, 4)) {
    if (schedule.name != "gpipe") continue;
    const ReceivePlan plan = plan_receives(schedule, chain_edges(schedule.depth()));
    for (const EarlyReceives& list : plan.lists) {
      for (const auto& rank : list) EXPECT_TRUE(rank.empty()) << named(schedule);
    }
  }
}

TEST(Receives, NoWaitForTheDeviceLastsForEver) {
  for (const Schedule& schedule : made_schedules(testing::kSanitized ? 4 : 6, 8)) {
    EXPECT_EQ(execution(schedule, Posting::kPlanned, kAlways), "") << named(schedule);
    for (unsigned seed = 0; seed < 4; ++seed) {
      const Drains drains = {.in_actions = 0.25 * seed, .between_batches = 0.5};
      EXPECT_EQ(execution(schedule, Posting::kPlanned, drains, seed), "") << named(schedule);
    }
  }
}

// Only now may an action receive several messages, and a rank wait for one of them.
TEST(Receives, EdgesMaySkipStages) {
  std::mt19937 random(3);
  for (const Schedule& schedule : made_schedules(testing::kSanitized ? 4 : 6, 5)) {
    if (schedule.depth() < 3) continue;
    std::vector<StageEdge> extra;
    for (int from = 0; from < schedule.depth(); ++from) {
      for (int to = from + 2; to < schedule.depth(); ++to) {
        if (random() % 3 == 0) extra.push_back({from, to});
      }
    }
    for (unsigned seed = 0; seed < 2; ++seed) {
      const Drains drains = {.in_actions = 1 - 0.5 * seed, .between_batches = 1};
      EXPECT_EQ(execution(schedule, Posting::kPlanned, drains, seed, extra), "") << named(schedule);
    }
  }
}

// A device has fewer queues than streams. In the worst case all share one.
TEST(Receives, NoTransferWaitsForOneThatIsBehindItInADevicesOnlyQueue) {
  std::mt19937 random(5);
  for (const Schedule& schedule : made_schedules(testing::kSanitized ? 4 : 6, 6)) {
    std::vector<StageEdge> extra;
    for (int round = 0; round < 3; ++round) {
      for (unsigned seed = 0; seed < 2; ++seed) {
        const Drains drains = {
            .in_actions = 0.3 * seed, .between_batches = 0.5, .in_one_queue = true};
        EXPECT_EQ(execution(schedule, Posting::kPlanned, drains, seed, extra), "")
            << named(schedule) << " and " << extra.size() << " edges more";
      }
      extra.clear();
      for (int from = 0; from < schedule.depth(); ++from) {
        for (int to = from + 2; to < schedule.depth(); ++to) {
          if (random() % 2 == 0) extra.push_back({from, to});
        }
      }
    }
  }
}

TEST(Receives, AnEvaluationOfAStageTwiceOnARankPostsAheadOfASkip) {
  // Rank 0 has stages 0 and 2, rank 1 has 1 and 3. Stage 0 sends to 3 before rank 1 comes there,
  // and rank 1 must send to stage 2, which rank 0 does not come to before that is received.
  const Schedule schedule = make_schedule("interleaved", 4, 2, 2);
  EXPECT_EQ(plan_receives(schedule, chain_edges(4)).evaluation, EarlyReceives(2));
  std::vector<StageEdge> edges = chain_edges(4);
  edges.push_back({0, 3});
  const EarlyReceives expected = {
      {},
      {{.action = 0,
        .moment = Moment::kWithSends,
        .receive = {.from = 0, .to = 3, .microbatch = 0}},
       {.action = 1, .receive = {.from = 2, .to = 3, .microbatch = 0}}}};
  EXPECT_EQ(plan_receives(schedule, edges).evaluation, expected);
}

TEST(Receives, OfSeveralThatAreConsumedTogetherTheFirstThatIsSentIsPostedFirst) {
  const Schedule schedule = make_schedule("2bw", 3, 3);
  const ReceivePlan plan = plan_receives(schedule, {{0, 1}, {1, 2}, {0, 2}});
  const std::string of_last = text(schedule, plan, 2, ListKind::kSteady);
  EXPECT_EQ(of_last, "<-2F0 0F0, <-2F0 1F0, <-2F1 0F1, <-2F1 0F2, <-2F1 1F1, 2B1-> 1F2");
}

TEST(Receives, TwoAheadSpinsForWhatItsOwnRankHasNotLaunched) {
  for (const Schedule& schedule : made_schedules(5, 8)) {
    const auto ranks = static_cast<int>(schedule.ranks.size());
    if (ranks == 1) continue;
    EXPECT_NE(execution(schedule, Posting::kTwoAhead, kAlways), "") << named(schedule);
    // Stages of which a gradient comes two batches' ends after its forward.
    if (schedule.name == "2bw") {
      EXPECT_EQ(execution(schedule, Posting::kTwoAhead, kBetweenBatches) != "", ranks >= 3)
          << named(schedule);
    }
  }
}

TEST(Receives, ConsumedOnlyTheySpinWhereNeighboursSendToEachOther) {
  for (const Schedule& schedule : made_schedules(5, 8)) {
    if (schedule.ranks.size() == 1 || schedule.num_microbatches == 1) continue;
    // All forwards before all backwards: nobody sends while its neighbour does.
    const bool is_one_way = schedule.name == "gpipe" || schedule.name == "looped_bfs";
    if (!is_one_way) {
      EXPECT_NE(execution(schedule, Posting::kWhenConsumed, kAlways), "") << named(schedule);
    }
    // The last gradients of a batch that are sent in it, and consumed in the next one.
    if (schedule.name == "2bw" || schedule.name == "pipedream") {
      EXPECT_NE(execution(schedule, Posting::kWhenConsumed, kBetweenBatches), "")
          << named(schedule);
    }
  }
}

// Schedules that are legal where receives do not spin.
TEST(Receives, RandomSchedulesHaveAPlanOrWaitForTheNextBatch) {
  ScheduleMutator mutator(11);
  int planned = 0;
  int refused = 0;
  for (int walks = testing::kSanitized ? 120 : 400; walks > 0; --walks) {
    walk(mutator, mutator.make(4, 4), 40, [&](const Schedule& schedule) {
      if (!value_error([&] { validate(schedule); }).empty()) return false;
      const std::string refusal =
          value_error([&] { plan_receives(schedule, chain_edges(schedule.depth())); });
      if (refusal.empty()) {
        EXPECT_EQ(execution(schedule, Posting::kPlanned, kAlways), "") << to_text(schedule);
        ++planned;
      } else if (schedule.num_pipelines == 1) {
        EXPECT_NE(refusal.find("sent in a later batch's list"), std::string::npos) << refusal;
        EXPECT_NE(execution(schedule, Posting::kAtOnce, kBetweenBatches), "") << to_text(schedule);
        ++refused;
      }
      return true;
    });
  }
  EXPECT_GT(planned, testing::kSanitized ? 100 : 300);
  EXPECT_GT(refused, testing::kSanitized ? 1 : 10);
}

// Clipping by norm, or a scaled loss.
std::vector<JointUpdate> all_stages(const Schedule& schedule) {
  JointUpdate all(schedule.num_stages);
  std::iota(all.begin(), all.end(), 0);
  return {all};
}

// Weights that are tied, of the first stage and the last, or of neighbours; both copies of each.
std::vector<JointUpdate> stages_of_copies(const Schedule& schedule, int a, int b) {
  JointUpdate tied;
  for (int first = 0; first < schedule.num_stages; first += schedule.depth()) {
    tied.insert(tied.end(), {first + a, first + b});
  }
  return {tied};
}

bool may_join(const Schedule& schedule, const std::vector<JointUpdate>& joint) {
  return value_error([&] { check_joint_updates(schedule, joint, "test"); }).empty();
}

constexpr Drains kEverywhere = {
    .in_actions = 1, .between_batches = 1, .in_updates = 1, .headers = 0};

std::string joint_execution(const Schedule& schedule, Posting posting,
                            const std::vector<JointUpdate>& joint, Drains drains,
                            unsigned seed = 1) {
  return ReceiveExecution(schedule, chain_edges(schedule.depth()), posting, seed, joint)
      .run({1, 4, 2}, drains);
}

TEST(Receives, NoUpdateThatOthersWaitForWaitsForAReceive) {
  for (const Schedule& schedule : made_schedules(testing::kSanitized ? 3 : 5, 6)) {
    const int last = schedule.depth() - 1;
    if (last == 0) continue;
    for (const auto& joint : {all_stages(schedule), stages_of_copies(schedule, 0, last),
                              stages_of_copies(schedule, last - 1, last)}) {
      if (!may_join(schedule, joint)) continue;
      // Only there a rank waits in a batch's list for an update of the next batch's.
      if (schedule.name == "pipedream" && schedule.num_microbatches == 1) continue;
      EXPECT_EQ(joint_execution(schedule, Posting::kPlanned, joint, kEverywhere), "")
          << named(schedule) << " " << joint[0].size();
      for (unsigned seed = 0; seed < 4; ++seed) {
        const Drains drains = {
            .in_actions = 0.25 * seed, .between_batches = 0.5, .in_updates = 0.5, .headers = 0.5};
        EXPECT_EQ(joint_execution(schedule, Posting::kPlanned, joint, drains, seed), "")
            << named(schedule) << " " << joint[0].size();
      }
    }
  }
}

TEST(Receives, APlanWithoutTheNormLetsUpdatesSpin) {
  int found_with_delay = 0;
  for (const Schedule& schedule : made_schedules(4, 8)) {
    if (schedule.ranks.size() == 1 || !may_join(schedule, all_stages(schedule))) continue;
    bool found = false;
    for (unsigned seed = 0; seed < 20 && !found; ++seed) {
      found = joint_execution(schedule, Posting::kPlannedWithoutJoint, all_stages(schedule),
                              {.in_updates = 1, .headers = 0}, seed) != "";
    }
    const bool has_delay = schedule.delay[0] > 0;
    if (!has_delay && schedule.num_pipelines == 1) {
      EXPECT_TRUE(found) << named(schedule);
    }
    found_with_delay += has_delay && found ? 1 : 0;
  }
  EXPECT_GT(found_with_delay, 10);
}

TEST(Receives, UpdatesAreAwaitedWhereAnUpdateIsThatForwardsReadLater) {
  const Schedule schedule = make_schedule("2bw", 3, 3);
  const ReceivePlan plan = plan_receives(schedule, chain_edges(3), all_stages(schedule));
  // The last stage comes to its next update before the others' forwards read this one's version.
  const int end = 6;
  const AwaitedUpdates at_end = {
      {{.action = end + 1, .stage = 0}}, {{.action = end + 1, .stage = 1}}, {}};
  EXPECT_EQ(plan.awaited[static_cast<std::size_t>(ListKind::kSteady)], at_end);
  for (const ListKind list : {ListKind::kPrologue, ListKind::kEpilogue}) {
    EXPECT_EQ(plan.awaited[static_cast<std::size_t>(list)], AwaitedUpdates(3));
  }
  // Without a delay a rank waits before its first forward, as everybody does.
  const Schedule flushed = make_schedule("1f1b", 3, 3);
  const ReceivePlan of_flushed = plan_receives(flushed, chain_edges(3), all_stages(flushed));
  for (const AwaitedUpdates& list : of_flushed.awaited) EXPECT_EQ(list, AwaitedUpdates(3));
}

TEST(Receives, RandomSchedulesWithJointUpdatesHaveAPlanOrWaitForTheNextBatch) {
  ScheduleMutator mutator(12);
  int planned = 0;
  int refused = 0;
  for (int walks = testing::kSanitized ? 40 : 400; walks > 0; --walks) {
    walk(mutator, mutator.make(4, 4), 40, [&](const Schedule& schedule) {
      if (!value_error([&] { validate(schedule); }).empty()) return false;
      const auto joint = mutator.below(2) || schedule.depth() == 1
                             ? all_stages(schedule)
                             : stages_of_copies(schedule, 0, schedule.depth() - 1);
      if (!may_join(schedule, joint)) return true;
      const bool has_plan =
          value_error([&] { plan_receives(schedule, chain_edges(schedule.depth())); }).empty();
      const std::string refusal =
          value_error([&] { plan_receives(schedule, chain_edges(schedule.depth()), joint); });
      if (refusal.empty()) {
        EXPECT_EQ(joint_execution(schedule, Posting::kPlanned, joint, kEverywhere), "")
            << to_text(schedule);
        ++planned;
      } else if (has_plan) {
        // Its stages read versions of different ages: a rank waits for an update that comes in
        // another one's next list.
        EXPECT_NE(refusal.find("for an update of all its stages"), std::string::npos) << refusal;
        EXPECT_NE(std::ranges::min(schedule.delay), std::ranges::max(schedule.delay));
        ++refused;
      }
      return true;
    });
  }
  EXPECT_GT(planned, testing::kSanitized ? 100 : 1000);
  EXPECT_LT(refused, planned / 20);
}

TEST(Receives, EdgesGoToLaterStages) {
  const Schedule schedule = make_schedule("1f1b", 2, 2);
  EXPECT_EQ(value_error([&] {
              plan_receives(schedule, {{1, 0}});
            }),
            "edges: 1 -> 0: an edge goes from a stage to a later one, of 2");
  EXPECT_EQ(value_error([&] {
              plan_receives(schedule, {{0, 2}});
            }),
            "edges: 0 -> 2: an edge goes from a stage to a later one, of 2");
}

TEST(Receives, LargePipelinesArePlannedInASecond) {
  const Schedule schedule = make_schedule("2bw", 64, 128);
  const auto begin = std::chrono::steady_clock::now();
  const ReceivePlan plan = plan_receives(schedule, chain_edges(64));
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  EXPECT_FALSE(plan.of(0, ListKind::kSteady).empty());
  if (!testing::kSanitized) {
    EXPECT_LT(seconds.count(), 1);
  }
}

}  // namespace
}  // namespace pd2
