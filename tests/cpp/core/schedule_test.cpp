#include "core/schedule.h"

#include "raises.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>

namespace pd2 {
namespace {

using testing::value_error;

// One stage's list typed out: "F0 F1 B0 U3".
std::vector<Action> typed(int stage, const std::string& text) {
  std::vector<Action> list;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    list.push_back({stage, static_cast<ActionKind>(word[0]), std::stoi(word.substr(1))});
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
  EXPECT_EQ(schedule.delay, 1);
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
  EXPECT_EQ(schedule.delay, 0);
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
  EXPECT_EQ(schedule.delay, 0);
  EXPECT_EQ(schedule.num_versions, (std::vector<int>{1, 1, 1, 1}));
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
            "schedule: \"2bww\": the known schedules are 2bw, 1f1b, gpipe");
  EXPECT_EQ(value_error([] { make_schedule("gpipe", 0, 4); }),
            "num_stages: 0: a pipeline needs num_stages >= 1");
  EXPECT_EQ(value_error([] { make_schedule("1f1b", 2, -3); }),
            "num_microbatches: -3: a batch needs num_microbatches >= 1");
  EXPECT_EQ(value_error([] { max_in_flight(make_schedule("1f1b", 2, 2), 2); }),
            "stage: 2, num_stages: 2: stages count from 0 to num_stages - 1");
}

TEST(Schedule, EveryNameCanBeMade) {
  for (const std::string& name : schedule_names()) EXPECT_EQ(make_schedule(name, 3, 3).name, name);
}

}  // namespace
}  // namespace pd2
