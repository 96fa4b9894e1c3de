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
class RankLists {
 public:
  RankLists(const ScheduleMethod& method, const ScheduleSizes& sizes, int rank)
      : method_(method),
        m_(sizes.num_microbatches),
        v_(sizes.stages_per_rank),
        ranks_(sizes.ranks()),
        rank_(rank),
        num_steps_(m_ * v_),
        lag_(method.lag_of(sizes, rank)),
        weight_lag_(method.weight_lag_of(rank)) {}

  RankActions make() {
    RankActions actions;
    if (method_.is_flushed()) {
      add_steps(actions.prologue, 0, end(), 0, num_steps_);
      actions.steady = actions.prologue;
    } else {
      add_steps(actions.prologue, 0, num_steps_, 0, num_steps_);
      add_steps(actions.steady, 0, num_steps_, -end(), num_steps_);
      add_steps(actions.epilogue, num_steps_, end(), -end(), num_steps_);
    }
    return actions;
  }

 private:
  // Steps after which all of a batch is done.
  int end() const { return num_steps_ + lag_ + weight_lag_; }

  // Steps begin .. end - 1, of which forwards and backwards number first .. last - 1 exist.
  void add_steps(std::vector<Action>& list, int begin, int end, int first, int last) const {
    const auto exists = [&](int index) { return index >= first && index < last; };
    for (int k = begin; k < end; ++k) {
      if (exists(k)) list.push_back(action(kForward, k));
      if (exists(k - lag_)) add_backward(list, method_.is_split ? kInputGrad : kBackward, k - lag_);
      const int weight = k - lag_ - weight_lag_;
      if (method_.is_split && exists(weight)) add_backward(list, kWeightGrad, weight);
    }
  }

  void add_backward(std::vector<Action>& list, ActionKind kind, int index) const {
    list.push_back(action(kind, index));
    const bool is_last = floor_mod(list.back().microbatch, m_) == m_ - 1;
    if (is_last && kind != kInputGrad) {
      list.push_back(
          {.stage = list.back().stage, .kind = kUpdate, .microbatch = list.back().microbatch});
    }
  }

  // The rank's index-th forward or backward; negative ones are the previous batches'.
  Action action(ActionKind kind, int index) const {
    const int group = method_.order == ChunkOrder::kDepthFirst && v_ > 1 ? ranks_ : m_;
    const int batch = floor_div(index, num_steps_);
    const int within = floor_mod(index, num_steps_);
    const int round = within / (group * v_);
    const int chunk = within % (group * v_) / group;
    const int microbatch = batch * m_ + round * group + within % group;
    const int stage = (kind == kForward ? chunk : v_ - 1 - chunk) * ranks_ + rank_;
    return {.stage = stage, .kind = kind, .microbatch = microbatch};
  }

  const ScheduleMethod& method_;
  const int m_;
  const int v_;
  const int ranks_;
  const int rank_;
  const int num_steps_;
  const int lag_;
  const int weight_lag_;
};

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
    schedule.ranks.push_back(RankLists(method, sizes, rank).make());
  }
  if (method.is_fresh) {
    schedule.late_forwards = late_forwards(schedule, update_of_slots(schedule, 1, {}));
  }
  return schedule;
}

}  // namespace pd2
