#include "core/schedule/generate_chimera.h"

#include "core/check.h"

#include <algorithm>
#include <map>
#include <vector>

namespace pd2 {
namespace {

using enum ActionKind;

// A unit has microbatches first .. first + count - 1 of each pipeline, `together` of them in a
// forward slot.
struct Unit {
  int begin;  // slot
  int first;
  int count;
  int together;
};

std::vector<Unit> units_of(int d, int m, int together) {
  std::vector<Unit> units;
  int begin = 0;
  for (int first = 0; first < m; first += units.back().count) {
    const int rest = m - first;
    const int in_slot = rest > d / 2 ? together : 1;
    units.push_back({begin, first, std::min(rest, in_slot * d / 2), in_slot});
    begin += d * (1 + in_slot);
  }
  return units;
}

// The actions of one rank by slot: stage i of pipeline 0 and stage d - 1 - i of pipeline 1. Since
// d is even, one's forwards and the other's backwards have the slots of one parity, where the
// backwards begin when the forwards are done.
std::vector<Action> rank_actions(int d, const std::vector<Unit>& units, int rank) {
  std::map<int, Action> slots;
  for (int pipeline = 0; pipeline < 2; ++pipeline) {
    const int i = pipeline == 0 ? rank : d - 1 - rank;
    const auto add = [&](int slot, ActionKind kind, int microbatch) {
      const Action action = {.stage = pipeline * d + i, .kind = kind, .microbatch = microbatch};
      const bool is_free = slots.emplace(slot, action).second;
      PD2_ASSERT(is_free, "slot ", slot, " of rank ", rank);
    };
    int last_slot = 0;
    for (const Unit& unit : units) {
      for (int n = 0; n < unit.count; ++n) {
        const int slot = 2 * (unit.begin + i + 2 * (n / unit.together)) + n % unit.together;
        add(slot, kForward, unit.first + n);
      }
      for (int n = 0; n < unit.count; ++n) {
        last_slot = 2 * (unit.begin + d + 2 * n + (d - 1 - i));
        add(last_slot, kBackward, unit.first + n);
      }
    }
    // The first idle slot after the last backward (in the middle of the ranks: after everything,
    // for there it would make the neighbour wait). The same slot on both ranks that hold the stage,
    // hence the same order.
    add(last_slot + 4, kUpdate, units.back().first + units.back().count - 1);
  }
  std::vector<Action> actions;
  for (const auto& [slot, action] : slots) actions.push_back(action);
  return actions;
}

}  // namespace

Schedule make_chimera(std::string_view name, int depth, int num_microbatches,
                      int microbatches_per_forward_slot) {
  const int d = depth;
  Schedule schedule;
  schedule.name = name;
  schedule.num_pipelines = 2;
  schedule.num_stages = 2 * d;
  schedule.num_microbatches = num_microbatches / 2;
  schedule.delay.assign(2 * d, 0);
  schedule.num_versions.assign(2 * d, 1);
  for (int stage = 0; stage < d; ++stage) schedule.placement.push_back(stage);
  for (int stage = 0; stage < d; ++stage) schedule.placement.push_back(d - 1 - stage);
  const std::vector<Unit> units =
      units_of(d, schedule.num_microbatches, microbatches_per_forward_slot);
  for (int rank = 0; rank < d; ++rank) {
    RankActions& actions = schedule.ranks.emplace_back();
    actions.prologue = rank_actions(d, units, rank);
    actions.steady = actions.prologue;
  }
  return schedule;
}

}  // namespace pd2
