// Updates for which all stages have to come together: clipping by the gradients' norm.
#pragma once

#include "core/schedule.h"

namespace pd2 {

// A forward that reads version v then waits until every stage of the model has come to its update
// of batch v - 1. Throws ValueError if with that the schedule ends in a deadlock.
void check_global_updates(const Schedule& schedule);

}  // namespace pd2
