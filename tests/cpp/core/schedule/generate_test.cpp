#include "core/schedule/generate.h"

#include "made_schedules.h"
#include "raises.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>

namespace pd2 {
namespace {

using testing::value_error;

// A rank's list typed out, "F0 F1 B0 U3"; with several stages a rank "0F0 2F0".
std::vector<Action> typed(int rank, const std::string& text) {
  std::vector<Action> list;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    const std::size_t kind = word.find_first_of("FBIWU");
    const int stage = kind == 0 ? rank : std::stoi(word.substr(0, kind));
    list.push_back({stage, static_cast<ActionKind>(word[kind]), std::stoi(word.substr(kind + 1))});
  }
  return list;
}

struct TypedRank {
  std::string prologue;
  std::string steady;
  std::string epilogue;
};

void expect_grid(const Schedule& schedule, const std::vector<TypedRank>& grid) {
  ASSERT_EQ(schedule.ranks.size(), grid.size());
  for (int stage = 0; stage < static_cast<int>(grid.size()); ++stage) {
    EXPECT_EQ(schedule.ranks[stage].prologue, typed(stage, grid[stage].prologue)) << stage;
    EXPECT_EQ(schedule.ranks[stage].steady, typed(stage, grid[stage].steady)) << stage;
    EXPECT_EQ(schedule.ranks[stage].epilogue, typed(stage, grid[stage].epilogue)) << stage;
  }
}

TEST(Schedule, TwoBwOfFourStagesAndFourMicrobatches) {
  const Schedule schedule = make_schedule("2bw", 4, 4);
  // clang-format off
  expect_grid(schedule, {
      {"F0 F1 F2 F3 B0",             "F0 B-3 F1 B-2 F2 B-1 U-1 F3 B0", "B1 B2 B3 U3"},
      {"F0 F1 F2 B0 F3 B1",          "F0 B-2 F1 B-1 U-1 F2 B0 F3 B1",  "B2 B3 U3"},
      {"F0 F1 B0 F2 B1 F3 B2",       "F0 B-1 U-1 F1 B0 F2 B1 F3 B2",   "B3 U3"},
      {"F0 B0 F1 B1 F2 B2 F3 B3 U3", "F0 B0 F1 B1 F2 B2 F3 B3 U3",     ""}});
  // clang-format on
  EXPECT_EQ(schedule.name, "2bw");
  EXPECT_EQ(schedule.num_stages, 4);
  EXPECT_EQ(schedule.num_microbatches, 4);
  EXPECT_EQ(schedule.delay, (std::vector<int>{1, 1, 1, 1}));
  EXPECT_EQ(schedule.placement, (std::vector<int>{0, 1, 2, 3}));
  EXPECT_EQ(schedule.num_versions, (std::vector<int>{2, 2, 2, 2}));
}

TEST(Schedule, TwoBwOfFourStagesAndFiveMicrobatches) {
  // clang-format off
  expect_grid(make_schedule("2bw", 4, 5), {
      {"F0 F1 F2 F3 B0 F4 B1",             "F0 B-3 F1 B-2 F2 B-1 U-1 F3 B0 F4 B1", "B2 B3 B4 U4"},
      {"F0 F1 F2 B0 F3 B1 F4 B2",          "F0 B-2 F1 B-1 U-1 F2 B0 F3 B1 F4 B2",  "B3 B4 U4"},
      {"F0 F1 B0 F2 B1 F3 B2 F4 B3",       "F0 B-1 U-1 F1 B0 F2 B1 F3 B2 F4 B3",   "B4 U4"},
      {"F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 U4", "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 U4",     ""}});
  // clang-format on
}

TEST(Schedule, OneFOneBOfFourStagesAndFourMicrobatches) {
  const std::vector<std::string> batches = {
      "F0 F1 F2 F3 B0 B1 B2 B3 U3",
      "F0 F1 F2 B0 F3 B1 B2 B3 U3",
      "F0 F1 B0 F2 B1 F3 B2 B3 U3",
      "F0 B0 F1 B1 F2 B2 F3 B3 U3",
  };
  std::vector<TypedRank> grid;
  for (const std::string& batch : batches) grid.push_back({batch, batch, ""});
  const Schedule schedule = make_schedule("1f1b", 4, 4);
  expect_grid(schedule, grid);
  EXPECT_EQ(schedule.delay, (std::vector<int>{0, 0, 0, 0}));
  EXPECT_EQ(schedule.num_versions, (std::vector<int>{1, 1, 1, 1}));
}

TEST(Schedule, OneFOneBWithFewerMicrobatchesThanStages) {
  const std::vector<std::string> batches = {"F0 F1 B0 B1 U1", "F0 F1 B0 B1 U1", "F0 F1 B0 B1 U1",
                                            "F0 B0 F1 B1 U1"};
  std::vector<TypedRank> grid;
  for (const std::string& batch : batches) grid.push_back({batch, batch, ""});
  expect_grid(make_schedule("1f1b", 4, 2), grid);
}

TEST(Schedule, GpipeRunsBackwardsInMicrobatchOrder) {
  const std::string batch = "F0 F1 F2 F3 B0 B1 B2 B3 U3";
  const Schedule schedule = make_schedule("gpipe", 4, 4);
  expect_grid(schedule, std::vector<TypedRank>(4, {batch, batch, ""}));
  EXPECT_EQ(schedule.delay, (std::vector<int>{0, 0, 0, 0}));
  EXPECT_EQ(schedule.num_versions, (std::vector<int>{1, 1, 1, 1}));
}

// arXiv 2006.09503 with twice the microbatches in flight: 2 (d - i) - 1.
TEST(Schedule, EagerTwoBwOfFourStages) {
  // clang-format off
  expect_grid(make_schedule("2bw_eager", 4, 7), {
      {"F0 F1 F2 F3 F4 F5 F6 B0",
       "F0 B-6 F1 B-5 F2 B-4 F3 B-3 F4 B-2 F5 B-1 U-1 F6 B0",
       "B1 B2 B3 B4 B5 B6 U6"},
      {"F0 F1 F2 F3 F4 B0 F5 B1 F6 B2",
       "F0 B-4 F1 B-3 F2 B-2 F3 B-1 U-1 F4 B0 F5 B1 F6 B2",
       "B3 B4 B5 B6 U6"},
      {"F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4",
       "F0 B-2 F1 B-1 U-1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4",
       "B5 B6 U6"},
      {"F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 U6",
       "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 U6",
       ""}});
  // clang-format on
}

TEST(Schedule, SplitTwoBwOfFourStages) {
  // clang-format off
  expect_grid(make_schedule("2bw_split", 4, 4), {
      {"F0 F1 F2 F3 I0 W0", "F0 I-3 W-3 F1 I-2 W-2 F2 I-1 W-1 U-1 F3 I0 W0",
       "I1 W1 I2 W2 I3 W3 U3"},
      {"F0 F1 F2 I0 W0 F3 I1 W1", "F0 I-2 W-2 F1 I-1 W-1 U-1 F2 I0 W0 F3 I1 W1",
       "I2 W2 I3 W3 U3"},
      {"F0 F1 I0 W0 F2 I1 W1 F3 I2 W2", "F0 I-1 W-1 U-1 F1 I0 W0 F2 I1 W1 F3 I2 W2",
       "I3 W3 U3"},
      {"F0 I0 W0 F1 I1 W1 F2 I2 W2 F3 I3 W3 U3", "F0 I0 W0 F1 I1 W1 F2 I2 W2 F3 I3 W3 U3", ""}});
  // clang-format on
}

// PipeDream, figure 8: worker 1 forwards four minibatches, then alternates; an update after each.
TEST(Schedule, PipedreamOfFourStages) {
  const Schedule schedule = make_schedule("pipedream", 4, 1);
  // clang-format off
  expect_grid(schedule, {
      {"F0",       "F0 B-3 U-3", "B-2 U-2 B-1 U-1 B0 U0"},
      {"F0",       "F0 B-2 U-2", "B-1 U-1 B0 U0"},
      {"F0",       "F0 B-1 U-1", "B0 U0"},
      {"F0 B0 U0", "F0 B0 U0",   ""}});
  // clang-format on
  EXPECT_EQ(schedule.delay, (std::vector<int>{3, 2, 1, 0}));
  EXPECT_EQ(schedule.num_versions, (std::vector<int>{4, 3, 2, 1}));
  for (int stage = 0; stage < 4; ++stage) EXPECT_EQ(max_in_flight(schedule, stage), 4 - stage);
}

// Megatron's interleaved schedule: four chunks on two ranks, warm-up 2 (p - r - 1) + (v - 1) p.
TEST(Schedule, InterleavedOfFourStagesOnTwoRanks) {
  const std::vector<std::string> batches = {
      "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 U2 0B2 0B3 U0",
      "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 U3 1B2 1B3 U1"};
  const Schedule schedule = make_schedule("interleaved", 4, 4, 2);
  ASSERT_EQ(schedule.placement, (std::vector<int>{0, 1, 0, 1}));
  for (int rank = 0; rank < 2; ++rank) {
    std::vector<Action> expected = typed(rank, batches[rank]);
    for (Action& action : expected) {  // "U2" is the update of stage 2
      if (action.kind == ActionKind::kUpdate) action = {action.microbatch, action.kind, 3};
    }
    EXPECT_EQ(schedule.ranks[rank].prologue, expected);
    EXPECT_EQ(schedule.ranks[rank].steady, expected);
    EXPECT_TRUE(schedule.ranks[rank].epilogue.empty());
  }
}

TEST(Schedule, LoopedBreadthFirstOfFourStagesOnTwoRanks) {
  const std::vector<TypedRank> grid = {
      {"0F0 0F1 2F0 2F1 2B0 2B1 2U1 0B0 0B1 0U1", "0F0 0F1 2F0 2F1 2B0 2B1 2U1 0B0 0B1 0U1", ""},
      {"1F0 1F1 3F0 3F1 3B0 3B1 3U1 1B0 1B1 1U1", "1F0 1F1 3F0 3F1 3B0 3B1 3U1 1B0 1B1 1U1", ""}};
  expect_grid(make_schedule("looped_bfs", 4, 2, 2), grid);
}

// The zero-bubble paper's figure of ZB-H1: the last worker begins its W after d input gradients.
TEST(Schedule, ZeroBubbleOfFourStages) {
  const std::vector<std::string> batches = {
      "F0 F1 F2 F3 I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5 U5",
      "F0 F1 F2 I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5 U5",
      "F0 F1 I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5 U5",
      "F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5 U5"};
  std::vector<TypedRank> grid;
  for (const std::string& batch : batches) grid.push_back({batch, batch, ""});
  const Schedule schedule = make_schedule("zero_bubble", 4, 6);
  expect_grid(schedule, grid);
  for (int stage = 0; stage < 4; ++stage) EXPECT_EQ(max_in_flight(schedule, stage), 4);
}

// The paper's figure of ZB-H2: 2 d - 1 microbatches in flight on every worker.
TEST(Schedule, ZeroBubbleWithTwiceTheMemoryOfFourStages) {
  const std::vector<std::string> batches = {
      "F0 F1 F2 F3 F4 F5 F6 I0 W0 F7 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 I6 W6 I7 W7 U7",
      "F0 F1 F2 F3 F4 I0 F5 I1 F6 I2 W0 F7 I3 W1 I4 W2 I5 W3 I6 W4 I7 W5 W6 W7 U7",
      "F0 F1 F2 I0 F3 I1 F4 I2 F5 I3 F6 I4 W0 F7 I5 W1 I6 W2 I7 W3 W4 W5 W6 W7 U7",
      "F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 F6 I6 W0 F7 I7 W1 W2 W3 W4 W5 W6 W7 U7"};
  std::vector<TypedRank> grid;
  for (const std::string& batch : batches) grid.push_back({batch, batch, ""});
  const Schedule schedule = make_schedule("zero_bubble_2p", 4, 8);
  expect_grid(schedule, grid);
  for (int stage = 0; stage < 4; ++stage) EXPECT_EQ(max_in_flight(schedule, stage), 7);
}

// ZB-H1 over chunks: W fills what the shorter warm-up would leave empty.
TEST(Schedule, InterleavedZeroBubbleOfFourStagesOnTwoRanks) {
  const std::vector<std::string> batches = {
      "0F0 0F1 2F0 2F1 2I0 2W0 0F2 2I1 2W1 0F3 0I0 0W0 2F2 0I1 0W1 2F3 2I2 2W2 2I3 2W3 2U3 "
      "0I2 0W2 0I3 0W3 0U3",
      "1F0 1F1 3F0 3I0 3F1 3I1 3W0 1F2 1I0 3W1 1F3 1I1 1W0 3F2 3I2 1W1 3F3 3I3 3W2 1I2 3W3 3U3 "
      "1I3 1W2 1W3 1U3"};
  std::vector<TypedRank> grid;
  for (const std::string& batch : batches) grid.push_back({batch, batch, ""});
  const Schedule schedule = make_schedule("interleaved_zero_bubble", 4, 4, 2);
  expect_grid(schedule, grid);
  EXPECT_EQ(schedule.placement, (std::vector<int>{0, 1, 0, 1}));
}

TEST(Schedule, InterleavedTwoBwGoesOnWhereTheFlushWouldBe) {
  const Schedule flushed = make_schedule("interleaved", 4, 4, 2);
  const Schedule schedule = make_schedule("interleaved_2bw", 4, 4, 2);
  // clang-format off
  EXPECT_EQ(schedule.ranks[1].steady, typed(1,
      "1F0 1B-2 1F1 1B-1 1U-1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 3U3"));
  EXPECT_EQ(schedule.ranks[1].epilogue, typed(1, "1B2 1B3 1U3"));
  // clang-format on
  for (int rank = 0; rank < 2; ++rank) {
    std::vector<Action> drained = schedule.ranks[rank].prologue;
    const std::vector<Action>& epilogue = schedule.ranks[rank].epilogue;
    drained.insert(drained.end(), epilogue.begin(), epilogue.end());
    EXPECT_EQ(drained, flushed.ranks[rank].prologue);
  }
}

std::vector<TypedRank> every_batch(const std::vector<std::string>& batches) {
  std::vector<TypedRank> grid;
  for (const std::string& batch : batches) grid.push_back({batch, batch, ""});
  return grid;
}

// arXiv 2107.06925, figure 3: stages 4 to 7 are the other pipeline's 0 to 3. Both ranks that hold a
// stage update in one order: the stage that is done first.
TEST(Schedule, ChimeraOfFourStages) {
  const Schedule schedule = make_schedule("chimera", 4, 4);
  // clang-format off
  expect_grid(schedule, every_batch({
      "0F0 0F1 7F0 7B0 7F1 7B1 0B0 7U1 0B1 0U1",
      "1F0 6F0 1F1 6F1 6B0 1B0 6B1 1B1 6U1 1U1",
      "5F0 2F0 5F1 2F1 2B0 5B0 2B1 5B1 2U1 5U1",
      "4F0 4F1 3F0 3B0 3F1 3B1 4B0 3U1 4B1 4U1"}));
  // clang-format on
  EXPECT_EQ(schedule.num_pipelines, 2);
  EXPECT_EQ(schedule.num_stages, 8);
  EXPECT_EQ(schedule.depth(), 4);
  EXPECT_EQ(schedule.num_microbatches, 2);
  EXPECT_EQ(schedule.delay, std::vector<int>(8, 0));
  EXPECT_EQ(schedule.num_versions, std::vector<int>(8, 1));
  EXPECT_EQ(schedule.placement, (std::vector<int>{0, 1, 2, 3, 3, 2, 1, 0}));
}

// Section 3.5, figure 7: the second unit's forwards begin in the bubbles of the first.
TEST(Schedule, ChimeraConcatenatesUnits) {
  // clang-format off
  expect_grid(make_schedule("chimera", 4, 8), every_batch({
      "0F0 0F1 7F0 7B0 7F1 7B1 0B0 0F2 0B1 0F3 7F2 7B2 7F3 7B3 0B2 7U3 0B3 0U3",
      "1F0 6F0 1F1 6F1 6B0 1B0 6B1 1B1 1F2 6F2 1F3 6F3 6B2 1B2 6B3 1B3 6U3 1U3",
      "5F0 2F0 5F1 2F1 2B0 5B0 2B1 5B1 5F2 2F2 5F3 2F3 2B2 5B2 2B3 5B3 2U3 5U3",
      "4F0 4F1 3F0 3B0 3F1 3B1 4B0 4F2 4B1 4F3 3F2 3B2 3F3 3B3 4B2 3U3 4B3 4U3"}));
  // clang-format on
}

// Section 3.5: two forwards in a slot as long as a backward.
TEST(Schedule, ChimeraWithForwardsDoubled) {
  // clang-format off
  expect_grid(make_schedule("chimera_doubled", 4, 8), every_batch({
      "0F0 0F1 0F2 0F3 7F0 7F1 7B0 7F2 7F3 7B1 0B0 7B2 0B1 7B3 0B2 7U3 0B3 0U3",
      "1F0 1F1 6F0 6F1 1F2 1F3 6F2 6F3 6B0 1B0 6B1 1B1 6B2 1B2 6B3 1B3 6U3 1U3",
      "5F0 5F1 2F0 2F1 5F2 5F3 2F2 2F3 2B0 5B0 2B1 5B1 2B2 5B2 2B3 5B3 2U3 5U3",
      "4F0 4F1 4F2 4F3 3F0 3F1 3B0 3F2 3F3 3B1 4B0 3B2 4B1 3B3 4B2 3U3 4B3 4U3"}));
  // clang-format on
}

TEST(Schedule, WhatIsLeftOfADoubledBatchIsAPlainUnit) {
  EXPECT_EQ(make_schedule("chimera_doubled", 4, 4).ranks, make_schedule("chimera", 4, 4).ranks);
  const std::vector<Action> list = make_schedule("chimera_doubled", 2, 6).ranks[0].steady;
  EXPECT_EQ(list, typed(0, "0F0 0F1 3F0 3F1 3B0 0B0 3B1 0B1 0F2 3F2 3B2 0B2 3U2 0U2"));
}

TEST(Schedule, ChimeraOfFewMicrobatches) {
  expect_grid(make_schedule("chimera", 2, 2),
              every_batch({"0F0 3F0 3B0 0B0 3U0 0U0", "2F0 1F0 1B0 2B0 1U0 2U0"}));
  // Fewer than stages, and a last unit that is not full.
  EXPECT_EQ(make_schedule("chimera", 4, 2).ranks[1].steady, typed(1, "1F0 6F0 6B0 1B0 6U0 1U0"));
  EXPECT_EQ(make_schedule("chimera", 4, 6).ranks[0].steady,
            typed(0, "0F0 0F1 7F0 7B0 7F1 7B1 0B0 0F2 0B1 7F2 7B2 7U2 0B2 0U2"));
}

TEST(Schedule, OneStageOfOneMicrobatch) {
  expect_grid(make_schedule("2bw", 1, 1), {{"F0 B0 U0", "F0 B0 U0", ""}});
  expect_grid(make_schedule("1f1b", 1, 1), {{"F0 B0 U0", "F0 B0 U0", ""}});
  expect_grid(make_schedule("gpipe", 1, 1), {{"F0 B0 U0", "F0 B0 U0", ""}});
}

TEST(Schedule, ActionsAreWrittenStageKindMicrobatch) {
  EXPECT_EQ(to_string(Action{2, ActionKind::kForward, 0}), "2F0");
  EXPECT_EQ(to_string(Action{0, ActionKind::kBackward, -1}), "0B-1");
  EXPECT_EQ(to_string(Action{0, ActionKind::kUpdate, -1}), "0U-1");
  EXPECT_EQ(to_string(Action{12, ActionKind::kWeightGrad, 34}), "12W34");
}

TEST(Schedule, MostInFlightIsWhatThePaperSays) {
  for (int d = 1; d <= 6; ++d) {
    for (int m = 1; m <= 2 * d + 1; ++m) {
      for (int stage = 0; stage < d; ++stage) {
        EXPECT_EQ(max_in_flight(make_schedule("gpipe", d, m), stage), m);
        EXPECT_EQ(max_in_flight(make_schedule("1f1b", d, m), stage), std::min(d - stage, m));
        if (m < d) continue;
        EXPECT_EQ(max_in_flight(make_schedule("2bw", d, m), stage), d - stage);
      }
    }
  }
}

TEST(Schedule, BadArgumentsNameTheRuleAndTheValues) {
  EXPECT_EQ(value_error([] { make_schedule("2bw", 4, 2); }),
            "num_microbatches: 2, num_stages: 4: 2bw needs num_microbatches >= num_stages");
  EXPECT_EQ(value_error([] { make_schedule("2bw", 4, 3); }),
            "num_microbatches: 3, num_stages: 4: 2bw needs num_microbatches >= num_stages");
  EXPECT_EQ(value_error([] { make_schedule("2bww", 4, 4); }),
            "schedule: \"2bww\": the known schedules are 2bw, 2bw_fresh, 2bw_eager, 2bw_split, "
            "interleaved_2bw, "
            "2bw_v, 2bw_v_two_thirds, 2bw_v_half, 2bw_v_min, "
            "pipedream, 1f1b, gpipe, interleaved, looped_bfs, zero_bubble, zero_bubble_2p, "
            "interleaved_zero_bubble, zero_bubble_v, v_half, v_min, chimera, chimera_doubled");
  EXPECT_EQ(
      value_error([] { make_schedule("2bw_eager", 4, 6); }),
      "num_microbatches: 6, num_stages: 4: 2bw_eager needs num_microbatches >= 2 * num_stages "
      "- 1");
  EXPECT_EQ(value_error([] { make_schedule("pipedream", 4, 2); }),
            "num_microbatches: 2: pipedream updates after every microbatch, so num_microbatches "
            "must be 1");
  EXPECT_EQ(value_error([] { make_schedule("interleaved", 4, 3, 2); }),
            "num_microbatches: 3, ranks: 2: interleaved needs num_microbatches to be a multiple of "
            "the ranks");
  EXPECT_EQ(value_error([] { make_schedule("interleaved_2bw", 8, 4, 2); }),
            "num_microbatches: 4, num_stages: 8: interleaved_2bw needs num_microbatches >= 6");
  EXPECT_EQ(value_error([] { make_schedule("interleaved_2bw", 4, 4); }),
            "num_microbatches: 4, num_stages: 4: interleaved_2bw needs num_microbatches >= 7");
  EXPECT_EQ(value_error([] { make_schedule("interleaved", 5, 4, 2); }),
            "num_stages: 5, stages_per_rank: 2: every rank has the same number of stages, so "
            "stages_per_rank must divide num_stages");
  EXPECT_EQ(
      value_error([] { make_schedule("2bw", 4, 4, 2); }),
      "stages_per_rank: 2, schedule: 2bw: only interleaved_2bw, 2bw_v, 2bw_v_two_thirds, "
      "2bw_v_half, 2bw_v_min, interleaved, looped_bfs, interleaved_zero_bubble, zero_bubble_v, "
      "v_half and v_min take more than 1");
  EXPECT_EQ(value_error([] { make_schedule("chimera", 3, 4); }),
            "num_stages: 3, schedule: chimera: two pipelines in opposite directions need an even "
            "num_stages");
  EXPECT_EQ(value_error([] { make_schedule("chimera_doubled", 4, 5); }),
            "num_microbatches: 5, schedule: chimera_doubled: half of a batch goes through each of "
            "2 pipelines, so num_microbatches must be even");
  EXPECT_EQ(
      value_error([] { make_schedule("chimera", 4, 4, 2); }),
      "stages_per_rank: 2, schedule: chimera: only interleaved_2bw, 2bw_v, 2bw_v_two_thirds, "
      "2bw_v_half, 2bw_v_min, interleaved, looped_bfs, interleaved_zero_bubble, zero_bubble_v, "
      "v_half and v_min take more than 1");
  EXPECT_EQ(value_error([] { make_schedule("gpipe", 0, 4); }),
            "num_stages: 0: a pipeline needs num_stages >= 1");
  EXPECT_EQ(value_error([] { make_schedule("1f1b", 2, -3); }),
            "num_microbatches: -3: a batch needs num_microbatches >= 1");
  EXPECT_EQ(value_error([] { max_in_flight(make_schedule("1f1b", 2, 2), 2); }),
            "stage: 2, num_stages: 2: stages count from 0 to num_stages - 1");
}

TEST(Schedule, EveryNameCanBeMade) {
  for (const std::string& name : schedule_names()) {
    const int m = name == "pipedream" ? 1 : 6;
    EXPECT_EQ(make_schedule(name, 2, m, testing::least_stages_per_rank(name)).name, name);
  }
}

}  // namespace
}  // namespace pd2
