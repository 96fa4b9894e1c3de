// Random schedules, legal and not: validate() must accept exactly those that train right, and what
// it accepts must pass everything that is asked of a schedule later.

#include "core/schedule/unroll.h"
#include "core/schedule/validate.h"
#include "planner/simulate/simulate.h"
#include "raises.h"
#include "sanitized.h"
#include "schedule_execution.h"
#include "schedule_mutations.h"

#include <gtest/gtest.h>

#include <set>

namespace pd2 {
namespace {

using testing::ScheduleExecution;
using testing::ScheduleMutator;
using testing::value_error;

// How many lists must have begun, at most, for a rank to finish one: the caller may not wait for a
// batch's lists before it has given that many.
int most_lists_ahead(const Schedule& schedule, int num_batches) {
  const int m = schedule.num_microbatches;
  struct At {
    int list = 0;
    std::size_t index = 0;
  };
  std::vector<At> at(schedule.ranks.size());
  std::vector<std::set<int>> outputs(schedule.num_stages), gradients(schedule.num_stages);
  const auto advance = [&](std::size_t rank, int given) {
    bool moved = false;
    for (At& here = at[rank]; here.list < given;) {
      const RankActions& lists = schedule.ranks[rank];
      const std::vector<Action>& list = here.list ? lists.steady : lists.prologue;
      if (here.index == list.size()) {
        here = {here.list + 1, 0};
        continue;
      }
      const Action& action = list[here.index];
      const int number = here.list * m + action.microbatch;
      const bool is_forward = action.kind == ActionKind::kForward;
      const bool is_backward =
          action.kind == ActionKind::kBackward || action.kind == ActionKind::kInputGrad;
      if (number >= 0) {
        if (is_forward && !schedule.is_first(action.stage) &&
            !outputs[action.stage - 1].contains(number))
          break;
        if (is_backward && !schedule.is_last(action.stage) &&
            !gradients[action.stage + 1].contains(number)) {
          break;
        }
        if (is_forward) outputs[action.stage].insert(number);
        if (is_backward) gradients[action.stage].insert(number);
      }
      ++here.index;
      moved = true;
    }
    return moved;
  };
  int most = 0;
  int finished = 0;
  for (int given = 1; given <= num_batches; ++given) {
    for (bool moved = true; moved;) {
      moved = false;
      for (std::size_t rank = 0; rank < at.size(); ++rank) moved = advance(rank, given) || moved;
    }
    int least = given;
    for (const At& here : at) least = std::min(least, here.list);
    if (least == finished) continue;
    finished = least;
    most = std::max(most, given - finished);
  }
  return std::max(most, num_batches - finished);
}

class Fuzz {
 public:
  // Whether it is legal.
  bool visit(const Schedule& schedule) {
    const std::string problem =
        ScheduleExecution(schedule).run({2 * schedule.num_stages + 3, 1, 1, 2, 5, 3, 1, 4, 2});
    const std::string error = value_error([&] { validate(schedule); });
    if (problem.empty() != error.empty()) {
      ADD_FAILURE() << "execution: " << problem << "\nvalidate: " << error << "\n"
                    << to_text(schedule);
      return false;
    }
    if (!error.empty()) {
      ++num_refused;
      return false;
    }
    ++num_legal;
    check_accepted(schedule);
    return true;
  }

  int num_legal = 0;
  int num_refused = 0;
  int num_late_forwards = 0;

 private:
  void check_accepted(const Schedule& schedule) {
    const std::string text = to_text(schedule);
    ASSERT_EQ(from_text(text), schedule);
    Costs costs;
    costs.stages.assign(schedule.depth(), {1, 1, 1});
    for (const int num_batches : {1, 2, most_batches_behind(schedule) + 3}) {
      Simulation result;
      ASSERT_EQ(value_error([&] { result = simulate(schedule, costs, num_batches); }), "") << text;
      for (int stage = 0; stage < schedule.num_stages; ++stage) {
        ASSERT_LE(result.most_in_flight[stage], max_in_flight(schedule, stage)) << text;
        if (num_batches > 2) {
          ASSERT_EQ(result.most_in_flight[stage], max_in_flight(schedule, stage)) << text;
        }
      }
    }
    if (forward_batches_behind(schedule) > 0) {
      ++num_late_forwards;
      return;
    }
    const int behind = std::max(most_batches_behind(schedule), 1);
    ASSERT_LE(most_lists_ahead(schedule, 4 * behind + 8), behind) << text;
  }
};

TEST(ScheduleFuzz, WhatTrainsRightIsAcceptedAndNothingElse) {
  Fuzz fuzz;
  constexpr int kSeeds = testing::kSanitized ? 60 : 300;
  for (int seed = 0; seed < kSeeds; ++seed) {
    SCOPED_TRACE(seed);
    ScheduleMutator mutator(static_cast<unsigned>(seed));
    testing::walk(mutator, mutator.make(6, 8), 60,
                  [&](const Schedule& schedule) { return fuzz.visit(schedule); });
    if (::testing::Test::HasFailure()) break;
  }
  EXPECT_GT(fuzz.num_legal, 10 * kSeeds / 3);
  EXPECT_GT(fuzz.num_refused, 70 * kSeeds / 3);
  EXPECT_GT(fuzz.num_late_forwards, kSeeds / 30);
  RecordProperty("legal", fuzz.num_legal);
  RecordProperty("refused", fuzz.num_refused);
}

}  // namespace
}  // namespace pd2
