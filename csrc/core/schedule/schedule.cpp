#include "core/schedule/schedule.h"

#include "core/check.h"
#include "core/schedule/unroll.h"

namespace pd2 {

using enum ActionKind;

std::string_view name_of(ActionKind kind) {
  constexpr std::array<std::string_view, kActionKinds.size()> kNames = {
      "forward", "backward", "input gradient", "weight gradient", "recomputed forward", "update"};
  return kNames[std::ranges::find(kActionKinds, kind) - kActionKinds.begin()];
}

std::string to_string(const Action& action) {
  return detail::concat(action.stage, static_cast<char>(action.kind), action.microbatch);
}

int max_in_flight(const Schedule& schedule, int stage) {
  PD2_CHECK(stage >= 0 && stage < static_cast<int>(schedule.placement.size()), "stage: ", stage,
            ", num_stages: ", schedule.placement.size(), ": stages count from 0 to num_stages - 1");
  int in_flight = 0;
  int most = 0;
  // Steady batches repeat each other: the one in which nothing is skipped any more shows what all
  // later ones do.
  const int num_batches = most_batches_behind(schedule) + 2;
  for (const Step& step : unroll(schedule, schedule.placement[stage], 0, num_batches)) {
    if (step.stage != stage) continue;
    if (step.kind == kForward) ++in_flight;
    if (step.kind == kBackward || step.kind == kWeightGrad) --in_flight;
    most = std::max(most, in_flight);
  }
  return most;
}

}  // namespace pd2
