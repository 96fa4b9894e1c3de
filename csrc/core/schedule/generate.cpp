#include "core/schedule/generate.h"

#include "core/check.h"
#include "core/floor.h"
#include "core/schedule/late_forwards.h"
#include "core/schedule/methods.h"

#include <algorithm>
#include <map>

namespace pd2 {
namespace {

using enum ActionKind;

// The lists of one rank. All schedules of one pipeline are one pattern: step k of a rank does its
// k-th forward, the backward that is `lag` steps behind, and, if backwards are split, the W that is
// `weight_lag` steps behind its I.
RankActions rank_lists(const ScheduleMethod& method, const ScheduleSizes& sizes, int rank) {
  const int m = sizes.num_microbatches;
  const int v = sizes.stages_per_rank;
  const int lag = method.lag_of(sizes, rank);
  Period step = {{.kind = kForward}, {.kind = kBackward, .lag = lag}};
  if (method.is_split) {
    step.back().kind = kInputGrad;
    step.push_back({.kind = kWeightGrad, .lag = lag + method.weight_lag_of(rank)});
  }
  const int group = method.order == ChunkOrder::kDepthFirst && v > 1 ? sizes.ranks() : m;
  return repeated(step, m * v, m, method.is_flushed(), [&](const PeriodAction& of, int index) {
    const int within = floor_mod(index, m * v);
    const int round = within / (group * v);
    const int chunk = within % (group * v) / group;
    const int microbatch = floor_div(index, m * v) * m + round * group + within % group;
    const int stage = (of.kind == kForward ? chunk : v - 1 - chunk) * sizes.ranks() + rank;
    return Action{.stage = stage, .kind = of.kind, .microbatch = microbatch};
  });
}

// Chimera: two pipelines over one model, in opposite directions (arXiv 2107.06925).
//
// Time in slots, each as long as a backward. A unit is, on stage i of either pipeline,
//
//   F of its q-th forward slot at  i + 2 q                   q = 0 .. d/2 - 1
//   B of its n-th microbatch at    d + 2 n + (d - 1 - i)     n = 0, 1, ...
//
// with one microbatch in a forward slot (then a unit has d microbatches, d/2 a pipeline, and 2 d
// slots), or with two (forward doubling, section 3.5: 2 d microbatches and 3 d slots, without
// bubbles inside where a backward takes twice a forward). Units follow each other without a gap: a
// unit's first forwards fall into the last one's bubbles.

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

// `num_microbatches`: of the batch. Of microbatches that fill no unit of 2 d the last d (or fewer)
// make one without doubling, as in the paper. d and m must be even.
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

}  // namespace

Schedule make_schedule(std::string_view name, int num_stages, int num_microbatches,
                       int stages_per_rank) {
  const ScheduleMethod* found = find_method(name);
  PD2_CHECK(found != nullptr, "schedule: \"", name, "\": the known schedules are ",
            joined(schedule_names()));
  const ScheduleMethod& method = *found;
  const ScheduleSizes sizes = {num_stages, num_microbatches, stages_per_rank};
  check_sizes(method, sizes);
  if (method.is_bidirectional()) {
    return make_chimera(name, num_stages, num_microbatches, method.microbatches_per_forward_slot);
  }
  if (method.is_v()) {
    return make_v_schedule(name, v_periods(sizes.ranks(), method.v).value(), num_microbatches,
                           method.is_flushed());
  }

  Schedule schedule;
  schedule.name = name;
  schedule.num_stages = num_stages;
  schedule.num_microbatches = num_microbatches;
  for (int stage = 0; stage < num_stages; ++stage) {
    const int delay = method.is_flushed()                       ? 0
                      : method.weights == Weights::kTwoVersions ? 1
                                                                : num_stages - 1 - stage;
    schedule.delay.push_back(delay);
    schedule.num_versions.push_back(delay + 1);
    schedule.placement.push_back(stage % sizes.ranks());
  }
  for (int rank = 0; rank < sizes.ranks(); ++rank) {
    schedule.ranks.push_back(rank_lists(method, sizes, rank));
  }
  if (method.is_fresh) {
    schedule.late_forwards = late_forwards(schedule, update_of_slots(schedule, 1, {}));
  }
  return schedule;
}

}  // namespace pd2
