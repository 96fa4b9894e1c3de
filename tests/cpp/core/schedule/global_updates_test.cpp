#include "core/schedule/global_updates.h"

#include "core/schedule/errors.h"
#include "made_schedules.h"

#include <gtest/gtest.h>

#include <string>

namespace pd2 {
namespace {

// Rank 0 comes to stage 0's update of batch t after stage 2's forward of batch t + 1.
Schedule stubborn() {
  return from_text(R"(
name: stubborn
stages: 3
microbatches: 1
delay: 1,0,0
placement: 0,1,0
versions: 2,1,1
[prologue]
0F0,2F0,2B0,2U0,0B0
1F0,1B0,1U0
[steady]
0F0,2F0,2B0,2U0,0U-1,0B0
1F0,1B0,1U0
[epilogue]
0U0
-
)");
}

bool ends(const Schedule& schedule, const std::vector<JointUpdate>& joint) {
  try {
    check_joint_updates(schedule, joint, "because");
    return true;
  } catch (const Deadlock& error) {
    EXPECT_NE(std::string(error.what()).find("because"), std::string::npos);
    return false;
  }
}

TEST(GlobalUpdates, OnlyStagesThatWaitForALateOneHang) {
  EXPECT_TRUE(ends(stubborn(), {}));
  EXPECT_TRUE(ends(stubborn(), {{1, 2}}));
  EXPECT_FALSE(ends(stubborn(), {{0, 1}}));
  EXPECT_FALSE(ends(stubborn(), {{0, 2}}));
  EXPECT_FALSE(ends(stubborn(), {{1, 2}, {0, 1}}));
  EXPECT_FALSE(ends(stubborn(), {{0, 1, 2}}));
}

TEST(GlobalUpdates, GeneratedSchedulesLetAllStagesWaitForEachOther) {
  for (const Schedule& schedule : testing::made_schedules(6, 8)) {
    EXPECT_NO_THROW(check_global_updates(schedule)) << to_text(schedule);
  }
}

}  // namespace
}  // namespace pd2
