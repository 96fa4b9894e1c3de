// V-shaped schedules: rank r of p holds stages r and 2 p - 1 - r, so that the pipeline goes down
// the ranks and up again, forward and backward (Qi et al., arXiv 2405.15362, section 4).
//
// Every rank repeats a period of six slots, in which it does an F, an I and a W of one microbatch
// for each of its two stages. A microbatch takes the same way through the ranks each time:
//
//   F of stage r            forward_down slots later than on rank r - 1
//   F of stage 2 p - 1 - r  forward_up slots later than on rank r + 1
//   I of stage 2 p - 1 - r  backward_down slots later than on rank r - 1
//   I of stage r            backward_up slots later than on rank r + 1
//
// The longer the way, the more microbatches are in flight, about (sum of the four) / 12 of p, and
// the longer messages may take.

#pragma once

#include "core/schedule/schedule.h"

#include <array>
#include <compare>
#include <functional>
#include <optional>
#include <string_view>
#include <vector>

namespace pd2 {

// Slots from a rank to the next one; 0: no V.
struct VSteps {
  int forward_down = 0;
  int forward_up = 0;
  int backward_down = 0;
  int backward_up = 0;

  auto operator<=>(const VSteps&) const = default;
};

// What a rank does in a period, in order.
struct PeriodAction {
  int chunk = 0;  // 0: stage r, 1: stage 2 p - 1 - r
  ActionKind kind = ActionKind::kForward;
  int lag = 0;  // by so many microbatches behind the period's own
};
using Period = std::vector<PeriodAction>;

// The lists of a rank that repeats a period `num_periods` times a batch of m microbatches. In the
// k-th it does action(of, k - of.lag) of each of the period's, where negative numbers are of the
// batches before. Behind a stage's last backward of a batch comes its update. `drains`: every batch
// does.
RankActions repeated(const Period& period, int num_periods, int m, bool drains,
                     const std::function<Action(const PeriodAction& of, int number)>& action);

// By rank. nullopt: with these steps two actions of a rank would have one slot. What is searched
// for is kept, for the functions below too: the planner asks for the same ones again and again.
std::optional<std::vector<Period>> v_periods(int ranks, const VSteps& steps);

// The microbatches of each of a rank's stages between F and the end of W, during an action.
std::array<int, 2> in_flight_at(const Period& period, int place);

// The most microbatches between F and the end of W at once on a rank, in halves: of both stages.
int most_halves_in_flight(const Period& period);

// The most microbatches of one of a rank's stages that have begun `from` and not ended `to` at
// once.
int most_between(const Period& period, int chunk, ActionKind from, ActionKind to);

// The fewest microbatches of a batch with two weight versions: a batch's last W of a stage comes
// before the stage's first F of the batch after the next. v_periods() must know the steps.
int least_microbatches(int ranks, const VSteps& steps);

// The most microbatches between F and the end of I of stage 0, which go through all stages and back
// in that time. v_periods() must know the steps.
int most_on_round_trip(int ranks, const VSteps& steps);

// `is_flushed`: one weight version, each batch drains. The form is right for any number of
// microbatches that are at least least_microbatches(), with two versions.
Schedule make_v_schedule(std::string_view name, const std::vector<Period>& periods,
                         int num_microbatches, bool is_flushed);

}  // namespace pd2
