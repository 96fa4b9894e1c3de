// Updates for which several stages have to come together.
#pragma once

#include "core/schedule/schedule.h"

#include <string_view>
#include <vector>

namespace pd2 {

// Stages whose updates wait for each other: a forward of one of them that reads version v waits
// until all of them have come to their update of batch v - 1.
using JointUpdate = std::vector<int>;

// Throws Deadlock if the schedule ends in one with these; the text says `why` they wait.
void check_joint_updates(const Schedule& schedule, const std::vector<JointUpdate>& joint,
                         std::string_view why);

// All stages wait for each other: for the gradients' norm, or until no stage can fail.
void check_global_updates(const Schedule& schedule);

}  // namespace pd2
