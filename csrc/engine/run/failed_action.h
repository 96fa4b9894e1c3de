// What an executor's thread was doing when something was thrown, and whose mistake that is.
#pragma once

#include "core/schedule/schedule.h"
#include "engine/fault.h"
#include "engine/run/run.h"

#include <cstdint>

namespace pd2 {

struct Doing {
  int stage = 0;
  ActionKind kind = ActionKind::kForward;
  std::int64_t run = 0;
  int microbatch = 0;
  bool evaluating = false;
};

// The exception that is being handled, and where it was thrown. `rank`: this process.
Failure describe_failure(const ExecutorSetup& setup, const Doing& doing, int rank);

// Whether the exception that is being handled comes out of the user's code, as far as its type
// tells.
bool is_of_users_code();

}  // namespace pd2
