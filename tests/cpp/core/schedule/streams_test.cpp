// The fences between a rank's streams order all that uses the same memory, for every schedule, and
// which of them could be done without is known.

#include "core/schedule/generate.h"
#include "core/schedule/validate.h"
#include "made_schedules.h"
#include "sanitized.h"
#include "schedule_mutations.h"
#include "stream_program.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <set>
#include <string>

namespace pd2 {
namespace {

using testing::FenceKind;
using testing::GradientPlaces;
using testing::made_schedules;
using testing::stream_problem;
using enum FenceKind;
using enum GradientPlaces;

constexpr GradientPlaces kPlaces[] = {kOne, kTwo, kRotating};
constexpr GradientPlaces kOfHost[] = {kOneOfHost, kRotatingOfHost};
constexpr GradientPlaces kAllPlaces[] = {kOne, kTwo, kRotating, kOneOfHost, kRotatingOfHost};

std::string named(const Schedule& schedule, GradientPlaces places) {
  return schedule.name + " d=" + std::to_string(schedule.depth()) +
         " m=" + std::to_string(schedule.num_microbatches) +
         " ranks=" + std::to_string(schedule.ranks.size()) +
         " places=" + std::to_string(static_cast<int>(places));
}

std::set<FenceKind> needed_fences(const Schedule& schedule, GradientPlaces places,
                                  bool saves = false) {
  std::set<FenceKind> needed;
  for (int i = 0; i < testing::kNumFences; ++i) {
    const auto fence = static_cast<FenceKind>(i);
    if (!stream_problem(schedule, places, fence, saves).empty()) needed.insert(fence);
  }
  return needed;
}

// Under a sanitizer fewer: the same code runs for all of them.
std::vector<Schedule> some_schedules(int max_stages) {
  return testing::kSanitized ? made_schedules(2, 2) : made_schedules(max_stages, 4);
}

TEST(Streams, AreInOrderInEverySchedule) {
  for (const GradientPlaces places : kAllPlaces) {
    for (const Schedule& schedule :
         made_schedules(testing::kSanitized ? 2 : 6, testing::kSanitized ? 4 : 8)) {
      for (const bool saves : {false, true}) {
        EXPECT_EQ(stream_problem(schedule, places, {}, saves), "")
            << named(schedule, places) << " saves=" << saves;
      }
    }
  }
}

TEST(Streams, AreInOrderInEveryLegalSchedule) {
  testing::ScheduleMutator mutator(5);
  int legal = 0;
  for (int walks = testing::kSanitized ? 20 : 200; walks > 0; --walks) {
    testing::walk(mutator, mutator.make(4, 4), 40, [&](const Schedule& schedule) {
      try {
        validate(schedule);
      } catch (const ValueError&) {
        return false;
      }
      ++legal;
      for (const GradientPlaces places : kAllPlaces) {
        const bool saves = legal % 2 == 0;
        EXPECT_EQ(stream_problem(schedule, places, {}, saves), "") << to_text(schedule);
      }
      return true;
    });
  }
  EXPECT_GT(legal, testing::kSanitized ? 30 : 300);
}

// Whether a rank is given nothing but the word to begin.
bool has_rank_without_inputs(const Schedule& schedule) {
  std::set<int> given;
  for (int stage = 0; stage < schedule.num_stages; ++stage) {
    if (schedule.is_first(stage) || schedule.is_last(stage))
      given.insert(schedule.placement[stage]);
  }
  return given.size() < schedule.ranks.size();
}

// What compute was given before an update, the update was too: only a caller who uses other memory
// needs to wait for both.
TEST(Streams, AllFencesButOneAreNeeded) {
  for (const GradientPlaces places : kPlaces) {
    for (const Schedule& schedule : some_schedules(4)) {
      std::set<FenceKind> needed = needed_fences(schedule, places);
      needed.erase(kVersionReady);
      needed.erase(kGradientsFree);
      std::set<FenceKind> expected = {kInputsGiven, kInputsTaken,       kInputsStaged,
                                      kLossesReady, kGradientsComplete, kUpdated};
      if (schedule.depth() > 1) expected.insert({kReceived, kMessageReady});
      if (has_rank_without_inputs(schedule)) expected.insert(kGiven);
      EXPECT_EQ(needed, expected) << named(schedule, places);
    }
  }
}

// The first forward that reads a version, and the first backward that adds to a buffer again, wait
// for updates: one of the two is enough but in a few schedules.
TEST(Streams, OneOfTheFencesAfterAnUpdateImpliesTheOther) {
  for (const GradientPlaces places : kPlaces) {
    for (const Schedule& schedule : some_schedules(4)) {
      const std::set<FenceKind> needed = needed_fences(schedule, places);
      const int delay = *std::ranges::max_element(schedule.delay);
      const bool waits_to_read = needed.contains(kVersionReady);
      const bool waits_to_add = needed.contains(kGradientsFree);
      // No forward of the next batch comes before the update, or there are buffers for the delay.
      const bool has_room = delay == 0 || places == kRotating || (places == kTwo && delay == 1);
      EXPECT_EQ(waits_to_add, !has_room) << named(schedule, places);
      if (has_room) {
        EXPECT_TRUE(waits_to_read) << named(schedule, places);
      }
      // One buffer, forwards two batches ahead of the update: the backwards between have waited.
      // In a V of few microbatches there may be none between.
      if (schedule.name.starts_with("2bw") && !find_method(schedule.name)->is_v() &&
          places == kOne) {
        EXPECT_FALSE(waits_to_read) << named(schedule, places);
      }
    }
  }
}

// A version is copied until the update that follows it begins.
TEST(Streams, BothFencesOfASaveAreNeeded) {
  for (const GradientPlaces places : kAllPlaces) {
    for (const Schedule& schedule : some_schedules(3)) {
      const std::set<FenceKind> needed = needed_fences(schedule, places, /*saves=*/true);
      EXPECT_TRUE(needed.contains(kVersionMade)) << named(schedule, places);
      EXPECT_TRUE(needed.contains(kCopied)) << named(schedule, places);
    }
  }
}

// What compute was given before an update is done before its gradients are fetched, and so before
// the host's weights are sent: the fences of the update itself are for batches that are left out.
// Without a delay, or behind a forward that is not late, the next backward comes after the update,
// and all that it fetches from.
TEST(Streams, FencesOfAnOptimizerOnTheHostAreNeeded) {
  for (const GradientPlaces places : kOfHost) {
    for (const Schedule& schedule : some_schedules(4)) {
      std::set<FenceKind> needed = needed_fences(schedule, places);
      std::set<FenceKind> expected = {kInputsGiven,    kInputsTaken,  kInputsStaged,   kLossesReady,
                                      kUpdated,        kVersionReady, kGradientsGiven, kFetched,
                                      kWeightsStepped, kWeightsSent};
      if (schedule.depth() > 1) expected.insert({kReceived, kMessageReady});
      if (has_rank_without_inputs(schedule)) expected.insert(kGiven);
      const std::vector<int> late = schedule.late_forwards_of_each();
      const int most = *std::ranges::max_element(late);
      if (most == schedule.num_microbatches) expected.insert({kStepped, kSent});
      if (most > 0 && places == kOneOfHost) expected.insert(kGradientsFetched);
      EXPECT_EQ(needed, expected) << named(schedule, places);
    }
  }
}

TEST(Streams, AProblemNamesBoth) {
  EXPECT_EQ(
      stream_problem(make_schedule("2bw", 2, 2), kOne, kGradientsComplete),
      "rank 0: \"U\" on stream update is not after \"backward\" on stream compute, which used "
      "gradients 0 of stage 0");
  EXPECT_EQ(stream_problem(make_schedule("2bw", 2, 2), kOne, kReceived),
            "rank 0: \"backward\" on stream compute is not after \"receives\" on stream receives, "
            "which used received -1 of stage 0");
}

TEST(Streams, LargePipelinesTakeASecond) {
  const Schedule schedule = make_schedule("2bw", 64, 128);
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(stream_problem(schedule, kOne), "");
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  if (!testing::kSanitized) {
    EXPECT_LT(seconds.count(), 1);
  }
}

}  // namespace
}  // namespace pd2
