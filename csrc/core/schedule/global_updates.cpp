#include "core/schedule/global_updates.h"

#include "core/schedule/errors.h"
#include "core/schedule/unroll.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace pd2 {
namespace {

using enum ActionKind;

// Which actions have been done, whenever that was: only the order matters.
class Progress {
 public:
  Progress(const Schedule& schedule, const std::vector<JointUpdate>& joint, int num_batches)
      : schedule_(schedule),
        num_microbatches_(std::int64_t{schedule.num_microbatches} * num_batches),
        forwards_(schedule.num_stages * num_microbatches_),
        backwards_(forwards_.size()),
        updates_(schedule.num_stages, 0),
        waits_for_(schedule.num_stages) {
    for (const JointUpdate& stages : joint) {
      for (const int stage : stages) {
        waits_for_[stage].insert(stages.begin(), stages.end());
      }
    }
  }

  bool can_run(const Step& step) const {
    const int batch = batch_of(step.microbatch, schedule_.num_microbatches);
    if (step.kind == kForward) {
      return has_weights(step.stage, batch - schedule_.delay[step.stage]) &&
             (schedule_.is_first(step.stage) || forwards_[index(step.stage - 1, step.microbatch)]);
    }
    if (step.kind == kBackward || step.kind == kInputGrad) {
      return schedule_.is_last(step.stage) || backwards_[index(step.stage + 1, step.microbatch)];
    }
    // One update of a stage after the other.
    return step.kind != kUpdate || has_weights(step.stage, batch);
  }

  void run(const Step& step) {
    if (step.kind == kForward) {
      forwards_[index(step.stage, step.microbatch)] = true;
    } else if (step.kind == kBackward || step.kind == kInputGrad) {
      backwards_[index(step.stage, step.microbatch)] = true;
    } else if (step.kind == kUpdate) {
      ++updates_[step.stage];
    }
  }

 private:
  bool has_weights(int stage, int version) const {
    return std::ranges::all_of(waits_for_[stage],
                               [&](int other) { return updates_[other] >= version; });
  }
  std::size_t index(int stage, std::int64_t microbatch) const {
    return stage * num_microbatches_ + microbatch;
  }

  const Schedule& schedule_;
  const std::int64_t num_microbatches_;
  std::vector<bool> forwards_, backwards_;  // by stage and microbatch
  std::vector<int> updates_;                // by stage: to how many it has come
  std::vector<std::set<int>> waits_for_;    // by stage
};

}  // namespace

void check_joint_updates(const Schedule& schedule, const std::vector<JointUpdate>& joint,
                         std::string_view why) {
  const int num_batches = most_batches_behind(schedule) + 4;
  Progress progress(schedule, joint, num_batches);
  std::vector<std::vector<Step>> steps;
  for (int rank = 0; rank < static_cast<int>(schedule.ranks.size()); ++rank) {
    steps.push_back(unroll(schedule, rank, 0, num_batches));
  }
  std::vector<std::size_t> next(steps.size(), 0);
  for (bool moved = true; moved;) {
    moved = false;
    for (std::size_t rank = 0; rank < steps.size(); ++rank) {
      for (; next[rank] < steps[rank].size() && progress.can_run(steps[rank][next[rank]]);
           ++next[rank]) {
        progress.run(steps[rank][next[rank]]);
        moved = true;
      }
    }
  }
  std::vector<Mark> stuck;
  std::string waiting;
  for (std::size_t rank = 0; rank < steps.size(); ++rank) {
    if (next[rank] < steps[rank].size()) {
      stuck.push_back({steps[rank][next[rank]].cell});
      waiting += detail::concat("\n  rank ", rank, " waits in ",
                                describe(schedule, steps[rank][next[rank]]));
    }
  }
  if (stuck.empty()) return;
  throw_schedule_error(schedule, ScheduleRule::kDeadlock, stuck,
                       detail::concat(why, ": expected every rank to finish, found ", stuck.size(),
                                      " of ", steps.size(), " waiting:", waiting));
}

void check_global_updates(const Schedule& schedule) {
  JointUpdate all(schedule.num_stages);
  std::iota(all.begin(), all.end(), 0);
  check_joint_updates(schedule, {all},
                      "clipping by norm needs every stage's gradients of batch t before any stage "
                      "reads version t + 1");
}

}  // namespace pd2
