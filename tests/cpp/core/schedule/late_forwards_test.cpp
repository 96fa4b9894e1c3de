#include "core/schedule/late_forwards.h"

#include "core/schedule/generate.h"
#include "raises.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

namespace pd2 {
namespace {

using testing::value_error;

JointUpdate all_of(const Schedule& schedule) {
  JointUpdate stages(schedule.num_stages);
  std::iota(stages.begin(), stages.end(), 0);
  return stages;
}

std::vector<int> late(const Schedule& schedule, int slots, std::vector<JointUpdate> joint = {}) {
  return late_forwards(schedule, update_of_slots(schedule, slots, std::move(joint)));
}

TEST(LateForwards, AStageHasDoneSomeOfTheNextBatchWhenItsUpdateBegins) {
  const Schedule schedule = make_schedule("2bw", 4, 8);
  EXPECT_EQ(late(schedule, 1), (std::vector<int>{4, 3, 2, 1}));
  EXPECT_EQ(late(schedule, 3), (std::vector<int>{6, 5, 4, 3}));
  EXPECT_EQ(late(schedule, 1, {all_of(schedule)}), (std::vector<int>{4, 4, 4, 3}));
  EXPECT_EQ(make_schedule("2bw_fresh", 4, 8).late_forwards, late(schedule, 1));
}

TEST(LateForwards, AStageWaitsForThoseOfItsGroupsAlone) {
  const Schedule schedule = make_schedule("2bw", 4, 8);
  EXPECT_EQ(late(schedule, 1, {{0, 3}}), (std::vector<int>{4, 3, 2, 3}));
  // Stage 3 waits for stage 1 through stage 2.
  EXPECT_EQ(late(schedule, 1, {{2, 3}, {1, 2}}), (std::vector<int>{4, 3, 3, 3}));
}

TEST(LateForwards, SecondsAreThoseOfTheUpdate) {
  const Schedule schedule = make_schedule("2bw", 3, 6);
  const UpdateTime update{.seconds = {0.0, 3.0, 3.1}, .joint = {}, .forward = 1, .backward = 2};
  EXPECT_EQ(late_forwards(schedule, update), (std::vector<int>{2, 2, 2}));
}

TEST(LateForwards, MayBeMoreThanABatchHas) {
  EXPECT_EQ(late(make_schedule("2bw", 3, 3), 20), (std::vector<int>{22, 21, 20}));
}

TEST(LateForwards, ADelayOfOneBatchIsNeeded) {
  EXPECT_EQ(value_error([] { late(make_schedule("1f1b", 2, 2), 1); }),
            "schedule: 1f1b, delay: 0: some forwards alone are late where the delay is 1");
  EXPECT_EQ(value_error([] { late(make_schedule("2bw", 2, 2), 0); }),
            "update_slots: 0: an update takes 1 at least");
}

}  // namespace
}  // namespace pd2
