#include "core/schedule/validate.h"

#include "made_schedules.h"
#include "raises.h"
#include "schedule_execution.h"

#include <gtest/gtest.h>

namespace pd2 {
namespace {

using testing::value_error;
using enum ActionKind;

std::string refusal(const Schedule& schedule) {
  return value_error([&] { validate(schedule); });
}

::testing::AssertionResult has_parts(const std::string& text,
                                     const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    if (text.find(part) == std::string::npos) {
      return ::testing::AssertionFailure() << "no \"" << part << "\" in:\n" << text;
    }
  }
  return ::testing::AssertionSuccess();
}

TEST(Validate, EveryMadeScheduleIsLegal) {
  for (const Schedule& schedule : testing::made_schedules(6, 13)) {
    EXPECT_EQ(refusal(schedule), "") << to_text(schedule);
    EXPECT_EQ(testing::execution_problem(schedule), "") << to_text(schedule);
  }
}

TEST(Validate, LargeSchedulesAreLegal) {
  EXPECT_EQ(refusal(make_schedule("2bw", 64, 80)), "");
  EXPECT_EQ(refusal(make_schedule("1f1b", 64, 16)), "");
}

TEST(Validate, TheGridShowsRanksAsRowsAndMarksTheCell) {
  Schedule schedule = make_schedule("2bw", 2, 2);
  std::swap(schedule.ranks[0].steady[1], schedule.ranks[0].steady[4]);
  EXPECT_EQ(refusal(schedule),
            "schedule 2bw: a stage's backwards are in microbatch order: expected microbatch 1 of "
            "batch 0, found 0B0 (steady, microbatch 0 of batch 1)\n"
            "prologue:\n"
            "  rank 0 | 0F0  0F1  0B0\n"
            "  rank 1 | 1F0  1B0  1F1  1B1  1U1\n"
            "steady:\n"
            "  rank 0 | 0F0  >0B0<  0U-1  0F1   0B-1\n"
            "  rank 1 | 1F0   1B0   1F1   1B1   1U1\n"
            "epilogue:\n"
            "  rank 0 | 0B1  0U1\n"
            "  rank 1 |\n");
}

TEST(Validate, OfLongListsTheGridShowsTheCellsAround) {
  Schedule schedule = make_schedule("gpipe", 2, 200);
  std::swap(schedule.ranks[1].steady[300], schedule.ranks[1].steady[301]);
  const std::string text = refusal(schedule);
  EXPECT_TRUE(has_parts(text, {">1B101<", " ... ", "1B95 "}));
  EXPECT_LT(text.size(), 2500u);
}

TEST(Validate, SizesFit) {
  Schedule schedule = make_schedule("1f1b", 3, 3);
  schedule.placement.pop_back();
  EXPECT_EQ(refusal(schedule),
            "schedule 1f1b: placement needs one entry per stage: expected 3, found 2");
  schedule = make_schedule("1f1b", 3, 3);
  schedule.num_versions.push_back(1);
  EXPECT_EQ(refusal(schedule),
            "schedule 1f1b: num_versions needs one entry per stage: expected 3, found 4");
  schedule = make_schedule("1f1b", 3, 3);
  schedule.ranks.pop_back();
  EXPECT_EQ(refusal(schedule),
            "schedule 1f1b: placement of stage 2: expected a rank from 0 to 1, found 2");
  schedule.ranks.resize(4);
  EXPECT_EQ(refusal(schedule),
            "schedule 1f1b: every rank needs a stage: expected 4 ranks in placement, found 3");
  EXPECT_EQ(refusal(Schedule()), "schedule : num_stages: expected >= 1, found 0");
  schedule = make_schedule("1f1b", 3, 3);
  schedule.num_microbatches = 0;
  EXPECT_EQ(refusal(schedule), "schedule 1f1b: num_microbatches: expected >= 1, found 0");
  schedule.num_microbatches = 2000000000;
  EXPECT_EQ(refusal(schedule),
            "schedule 1f1b: num_microbatches: 2000000000, actions in prologue and epilogue: 21: "
            "every microbatch needs its actions");
  schedule = make_schedule("1f1b", 3, 3);
  schedule.delay[1] = -1;
  EXPECT_EQ(refusal(schedule), "schedule 1f1b: delay: expected >= 0, found -1");
  schedule = make_schedule("1f1b", 3, 3);
  schedule.num_versions[1] = 0;
  EXPECT_EQ(refusal(schedule), "schedule 1f1b: num_versions: expected >= 1, found 0");
}

TEST(Validate, AStageExistsAndIsOnItsRank) {
  Schedule schedule = make_schedule("1f1b", 2, 2);
  schedule.ranks[1].steady[2].stage = 2;
  EXPECT_TRUE(has_parts(refusal(schedule), {"expected a stage from 0 to 1, found 2F1", ">2F1<"}));
  schedule.ranks[1].steady[2].stage = 0;
  EXPECT_TRUE(has_parts(refusal(schedule), {"expected 0F1 on rank 0, found on rank 1", ">0F1<"}));
}

TEST(Validate, MicrobatchNumbersAreInRange) {
  Schedule schedule = make_schedule("2bw", 2, 3);
  schedule.ranks[0].prologue[0].microbatch = -1;
  EXPECT_TRUE(has_parts(refusal(schedule),
                        {"numbers in the prologue: expected 0 to 2, found 0F-1", ">0F-1<"}));
  schedule = make_schedule("2bw", 2, 3);
  schedule.ranks[0].steady[0].microbatch = 3;
  EXPECT_TRUE(has_parts(refusal(schedule),
                        {"numbers in the steady: expected -6 to 2, found 0F3", ">0F3<"}));
}

TEST(Validate, AMissingActionIsShownInItsRow) {
  Schedule schedule = make_schedule("gpipe", 2, 1);
  schedule.ranks[1].prologue.erase(schedule.ranks[1].prologue.begin() + 1);
  EXPECT_EQ(refusal(schedule),
            "schedule gpipe: every action exactly once: expected one 1B0 for batch 0 in a run of 4 "
            "batches and a drain, found none\n"
            "prologue:\n"
            "  rank 0 | 0F0   0B0   0U0\n"
            "  rank 1 | 1F0   1U0  >1B0?<\n"
            "steady:\n"
            "  rank 0 | 0F0  0B0  0U0\n"
            "  rank 1 | 1F0  1B0  1U0\n"
            "epilogue:\n"
            "  rank 0 |\n"
            "  rank 1 |\n");
  schedule = make_schedule("gpipe", 2, 1);
  schedule.ranks[0].steady.erase(schedule.ranks[0].steady.begin());
  EXPECT_TRUE(
      has_parts(refusal(schedule), {"expected one 0F0 for batch 1", "rank 0 | 0B0   0U0  >0F0?<"}));
  EXPECT_TRUE(has_parts(refusal(from_text("0F0,0I0")), {"expected one 0W0 for", ">0W0?<"}));
  EXPECT_TRUE(has_parts(refusal(from_text("0F0,0W0")), {"expected one 0I0 for", ">0I0?<"}));
}

TEST(Validate, EveryActionIsThereExactlyOnce) {
  Schedule schedule = make_schedule("2bw", 2, 2);
  schedule.ranks[1].steady.erase(schedule.ranks[1].steady.begin() + 1);
  EXPECT_TRUE(has_parts(
      refusal(schedule),
      {"every action exactly once: expected one 1B0 for batch 1", "found none", ">1B0?<"}));
  schedule = make_schedule("2bw", 2, 2);
  schedule.ranks[0].epilogue.insert(schedule.ranks[0].epilogue.begin(), {0, kBackward, 0});
  EXPECT_TRUE(has_parts(refusal(schedule),
                        {"expected 0B0 (steady, microbatch 0 of batch 3) only, found 0B0 "
                         "(epilogue, microbatch 0 of batch 3) too",
                         "0F1  >0B0<", "rank 0 |>0B0<"}));
  schedule = make_schedule("gpipe", 1, 1);
  schedule.ranks[0].prologue.insert(schedule.ranks[0].prologue.begin() + 2, {0, kWeightGrad, 0});
  EXPECT_TRUE(has_parts(refusal(schedule), {"either B, or I and W", ">0B0<", ">0W0<"}));
  schedule = make_schedule("gpipe", 1, 1);
  schedule.ranks[0].steady.pop_back();
  EXPECT_TRUE(has_parts(refusal(schedule), {"expected one 0U0 for batch 1", ">0U0?<"}));
}

TEST(Validate, BackwardsComeAfterTheirForward) {
  Schedule schedule = make_schedule("1f1b", 2, 2);
  std::swap(schedule.ranks[1].prologue[2], schedule.ranks[1].prologue[3]);
  EXPECT_TRUE(has_parts(refusal(schedule), {"a backward comes after its forward: expected 1F of "
                                            "microbatch 1 of batch 0 before 1B1",
                                            "found 1 forwards done", ">1B1<"}));
}

TEST(Validate, WeightGradientsComeAfterInputGradients) {
  const Schedule schedule = from_text("0F0,0W0,0I0");
  EXPECT_TRUE(has_parts(refusal(schedule), {"W comes after its I", "found 0 input", ">0W0<"}));
}

TEST(Validate, ForwardsAndGradientsAreInMicrobatchOrder) {
  Schedule schedule = make_schedule("gpipe", 2, 3);
  std::swap(schedule.ranks[0].prologue[0], schedule.ranks[0].prologue[1]);
  EXPECT_TRUE(has_parts(refusal(schedule),
                        {"forwards are in microbatch order: expected microbatch 0 of batch 0, "
                         "found 0F1 (prologue, microbatch 1 of batch 0)",
                         ">0F1<"}));
  schedule = make_schedule("gpipe", 2, 3);
  std::swap(schedule.ranks[1].steady[4], schedule.ranks[1].steady[5]);
  EXPECT_TRUE(has_parts(refusal(schedule),
                        {"backwards are in microbatch order: expected microbatch 1 of batch 1, "
                         "found 1B2 (steady, microbatch 2 of batch 1)",
                         ">1B2<"}));
  EXPECT_TRUE(has_parts(refusal(from_text("0F0,0F1,0I0,0I1,0W1,0W0")),
                        {"gradients of a batch add up in microbatch order: expected microbatch 0 "
                         "of batch 0, found 0W1",
                         ">0W1<"}));
}

TEST(Validate, AnUpdateComesAfterItsBatchsLastBackward) {
  Schedule schedule = make_schedule("2bw", 2, 2);
  std::swap(schedule.ranks[1].steady[3], schedule.ranks[1].steady[4]);
  EXPECT_TRUE(has_parts(refusal(schedule), {"an update comes after its batch's last backward: "
                                            "expected 4 backwards of this run before 1U1",
                                            "found 3", ">1U1<"}));
}

TEST(Validate, AnUpdateComesBeforeTheNextBatchsFirstBackward) {
  Schedule schedule = make_schedule("2bw", 2, 2);
  std::vector<Action>& steady = schedule.ranks[0].steady;  // F0 B-1 U-1 F1 B0
  std::rotate(steady.begin() + 2, steady.begin() + 3, steady.end());
  EXPECT_TRUE(has_parts(refusal(schedule), {"one gradient buffer: expected the update of batch 0 "
                                            "before 0B0",
                                            "found 0 updates", ">0B0<"}));
}

TEST(Validate, AnUpdateComesBeforeTheForwardThatReadsItsVersion) {
  Schedule schedule = make_schedule("2bw", 2, 2);
  schedule.delay.assign(schedule.num_stages, 0);
  EXPECT_TRUE(
      has_parts(refusal(schedule), {"expected the update of batch 0 before 0F0",
                                    "reads version 1, found version 0 as the newest", ">0F0<"}));
}

TEST(Validate, NeverMoreVersionsAliveThanKept) {
  for (const int stage : {0, 1}) {
    Schedule schedule = make_schedule("2bw", 2, 2);
    schedule.num_versions[stage] = 1;
    EXPECT_EQ(
        refusal(schedule),
        "schedule 2bw: versions alive never above num_versions: expected at most 1 on stage " +
            std::to_string(stage) +
            ", found 2: after a drain batch t reads version t - 1 when version t is made");
  }
}

TEST(Validate, ADelayOfManyBatchesNeedsItsVersionsToo) {
  Schedule schedule = make_schedule("gpipe", 2, 2);
  schedule.delay[1] = 50;
  schedule.num_versions[1] = 50;  // enough for the first 50 batches
  EXPECT_EQ(testing::ScheduleExecution(schedule).run({50}), "");
  EXPECT_EQ(testing::ScheduleExecution(schedule).run({51}), "forward's version");
  EXPECT_TRUE(has_parts(refusal(schedule), {"expected at most 50 on stage 1, found 51"}));
  schedule.num_versions[1] = 51;
  EXPECT_EQ(refusal(schedule), "");
}

TEST(Validate, ADeadlockShowsEachStuckRanksAction) {
  Schedule schedule = make_schedule("gpipe", 3, 2);
  // Stage 0 wants a gradient before it gives the second microbatch that stage 2 wants first.
  std::swap(schedule.ranks[0].prologue[1], schedule.ranks[0].prologue[2]);
  EXPECT_TRUE(
      has_parts(refusal(schedule),
                {"deadlock: expected every rank to finish, found 3 of 3 waiting for each other:",
                 "rank 0 waits in 0B0 (prologue, microbatch 0 of batch 0) for stage 1",
                 "rank 1 waits in 1F1 (prologue, microbatch 1 of batch 0) for stage 0",
                 "rank 2 waits in 2F1 (prologue, microbatch 1 of batch 0) for stage 1", ">0B0<",
                 ">1F1<", ">2F1<"}));
}

TEST(Validate, CopiesThatUpdateInTwoOrdersDeadlock) {
  Schedule schedule = make_schedule("chimera", 2, 2);
  std::vector<Action>& list = schedule.ranks[1].steady;
  std::swap(list[4], list[5]);
  EXPECT_EQ(refusal(schedule),
            "schedule chimera: deadlock: expected every rank to finish, found 2 of 2 waiting for "
            "each other:\n"
            "  rank 0 waits in 3U0 (steady, batch 1) for stage 1\n"
            "  rank 1 waits in 2U0 (steady, batch 1) for stage 0\n"
            "prologue:\n"
            "  rank 0 | 0F0  3F0  3B0  0B0  3U0  0U0\n"
            "  rank 1 | 2F0  1F0  1B0  2B0  1U0  2U0\n"
            "steady:\n"
            "  rank 0 | 0F0  3F0  3B0  0B0 >3U0< 0U0\n"
            "  rank 1 | 2F0  1F0  1B0  2B0 >2U0< 1U0\n"
            "epilogue:\n"
            "  rank 0 |\n"
            "  rank 1 |\n");
}

TEST(Validate, CopiesAreOnTwoRanksAndOfOneDelay) {
  Schedule schedule = make_schedule("chimera", 2, 2);
  schedule.placement = {0, 1, 0, 1};
  EXPECT_EQ(refusal(schedule),
            "schedule chimera: the two copies of a stage are on two ranks: expected stages 0 and 2 "
            "on different ranks, found both on rank 0");
  schedule = make_schedule("chimera", 2, 2);
  schedule.delay = {0, 0, 0, 1};
  EXPECT_EQ(refusal(schedule),
            "schedule chimera: the two copies of a stage have one delay: expected 0 of stage 3 as "
            "of stage 1, found 1");
  schedule.num_pipelines = 3;
  EXPECT_EQ(refusal(schedule), "schedule chimera: num_pipelines: expected 1 or 2, found 3");
  schedule.num_pipelines = 2;
  schedule.num_stages = 3;
  EXPECT_EQ(refusal(schedule),
            "schedule chimera: every pipeline has all stages: expected num_stages to be a multiple "
            "of 2, found 3");
}

TEST(Validate, ADrainAfterTheFirstBatchMayDeadlockWhereLongerRunsDoNot) {
  // Rank 0 waits for its first gradient before its second forward, which rank 1's epilogue wants
  // first, and only its epilogue.
  const Schedule schedule = from_text(
      "name: by hand\nstages: 2\nmicrobatches: 2\ndelay: 1\nplacement: 0,1\nversions: 2,2\n"
      "[prologue]\n0F0,0B0,0F1\n1F0\n"
      "[steady]\n0B-1,0U-1,0F0,0F1,0B0\n1B-2,1F-1,1B-1,1U-1,1F0\n"
      "[epilogue]\n0B1,0U1\n1F1,1B0,1B1,1U1\n");
  EXPECT_EQ(testing::ScheduleExecution(schedule).run({3, 2, 4}), "");
  EXPECT_EQ(testing::ScheduleExecution(schedule).run({1}), "deadlock");
  EXPECT_TRUE(has_parts(refusal(schedule), {"deadlock", ">0B0<", ">1F1<"}));
}

TEST(Validate, TwoBwByHandWithOneMicrobatchFewerThanStagesIsLegal) {
  // make_schedule's rule is m >= d, the exact bound m >= d - 1.
  const std::string two_stages =
      "name: 2bw\nstages: 2\nmicrobatches: 1\ndelay: 1\nplacement: 0,1\nversions: 2,2\n"
      "[prologue]\n0F0\n1F0,1B0,1U0\n[steady]\n0F0,0B-1,0U-1\n1F0,1B0,1U0\n"
      "[epilogue]\n0B0,0U0\n-\n";
  EXPECT_EQ(refusal(from_text(two_stages)), "");
}

}  // namespace
}  // namespace pd2
