// Random legal schedules in the engine: every one trains what its delays say.

#include "core/schedule/schedule_mutations.h"
#include "core/schedule/validate.h"
#include "raises.h"
#include "sanitized.h"
#include "scalar_pipeline.h"

#include <gtest/gtest.h>

namespace pd2 {
namespace {

using testing::expect_trajectory;
using testing::ScheduleMutator;

TEST(ScheduleFuzzTest, WhatIsAcceptedTrainsWhatItsDelaysSay) {
  int num_trained = 0;
  const unsigned num_seeds = testing::kSanitized ? 30 : 120;
  for (unsigned seed = 0; seed < num_seeds && !HasFailure(); ++seed) {
    ScheduleMutator mutator(seed);
    testing::walk(mutator, mutator.make(6, 6), 60, [&](const Schedule& schedule) {
      if (HasFailure() || testing::value_error([&] { validate(schedule); }) != "") return false;
      SCOPED_TRACE(to_text(schedule));
      testing::Drains drains;
      if (mutator.below(2)) {
        drains.before_step = static_cast<unsigned>(mutator.below(1 << 7));
        drains.after_step = static_cast<unsigned>(mutator.below(1 << 7));
      }
      expect_trajectory(schedule, drains);
      ++num_trained;
      return true;
    });
  }
  EXPECT_GT(num_trained, testing::kSanitized ? 75 : 300);
}

}  // namespace
}  // namespace pd2
