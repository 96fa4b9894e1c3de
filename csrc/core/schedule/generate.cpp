#include "core/schedule/generate.h"

#include "core/check.h"
#include "core/schedule/generate_chimera.h"
#include "core/schedule/methods.h"

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
    const int batch = (index - floor_mod(index, num_steps_)) / num_steps_;
    const int within = floor_mod(index, num_steps_);
    const int round = within / (group * v_);
    const int chunk = within % (group * v_) / group;
    const int microbatch = batch * m_ + round * group + within % group;
    const int stage = (kind == kForward ? chunk : v_ - 1 - chunk) * ranks_ + rank_;
    return {.stage = stage, .kind = kind, .microbatch = microbatch};
  }

  static int floor_mod(int a, int b) { return (a % b + b) % b; }

  const ScheduleMethod& method_;
  const int m_;
  const int v_;
  const int ranks_;
  const int rank_;
  const int num_steps_;
  const int lag_;
  const int weight_lag_;
};

}  // namespace

std::vector<std::string> schedule_names() {
  std::vector<std::string> names;
  for (const ScheduleMethod& method : schedule_methods()) names.emplace_back(method.name);
  return names;
}

Schedule make_schedule(std::string_view name, int num_stages, int num_microbatches,
                       int stages_per_rank) {
  const ScheduleMethod* found = find_method(name);
  if (found == nullptr) {
    std::string known;
    for (const ScheduleMethod& method : schedule_methods()) {
      known += detail::concat(known.empty() ? "" : ", ", method.name);
    }
    detail::throw_value_error(
        detail::concat("schedule: \"", name, "\": the known schedules are ", known));
  }
  const ScheduleMethod& method = *found;
  const ScheduleSizes sizes = {num_stages, num_microbatches, stages_per_rank};
  check_sizes(method, sizes);
  if (method.is_bidirectional()) {
    return make_chimera(name, num_stages, num_microbatches, method.microbatches_per_forward_slot);
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
  return schedule;
}

}  // namespace pd2
