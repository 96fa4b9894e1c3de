#include "core/global_updates.h"

#include "core/check.h"
#include "core/grid.h"
#include "core/unroll.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace pd2 {
namespace {

using enum ActionKind;

// Which actions have been done, whenever that was: only the order matters.
class Progress {
 public:
  Progress(const Schedule& schedule, int num_batches)
      : schedule_(schedule),
        num_microbatches_(std::int64_t{schedule.num_microbatches} * num_batches),
        forwards_(schedule.num_stages * num_microbatches_),
        backwards_(forwards_.size()),
        updates_(num_batches, 0) {}

  bool can_run(const Step& step) const {
    if (step.kind == kForward) {
      const int batch = batch_of(step.microbatch, schedule_.num_microbatches);
      const int version = batch - schedule_.delay[step.stage];
      const bool has_weights = version <= 0 || updates_[version - 1] == schedule_.num_stages;
      return has_weights &&
             (schedule_.is_first(step.stage) || forwards_[index(step.stage - 1, step.microbatch)]);
    }
    if (step.kind == kBackward || step.kind == kInputGrad) {
      return schedule_.is_last(step.stage) || backwards_[index(step.stage + 1, step.microbatch)];
    }
    return true;
  }

  void run(const Step& step) {
    if (step.kind == kForward) {
      forwards_[index(step.stage, step.microbatch)] = true;
    } else if (step.kind == kBackward || step.kind == kInputGrad) {
      backwards_[index(step.stage, step.microbatch)] = true;
    } else if (step.kind == kUpdate) {
      ++updates_[batch_of(step.microbatch, schedule_.num_microbatches)];
    }
  }

 private:
  std::size_t index(int stage, std::int64_t microbatch) const {
    return stage * num_microbatches_ + microbatch;
  }

  const Schedule& schedule_;
  const std::int64_t num_microbatches_;
  std::vector<bool> forwards_, backwards_;  // by stage and microbatch
  std::vector<int> updates_;                // stages that have come to it, by batch
};

}  // namespace

void check_global_updates(const Schedule& schedule) {
  const int num_batches = most_batches_behind(schedule) + 4;
  Progress progress(schedule, num_batches);
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
  PD2_CHECK(stuck.empty(), "schedule ", schedule.name,
            ": clipping by norm needs every stage's gradients of batch t before any stage reads ",
            "version t + 1: expected every rank to finish, found ", stuck.size(), " of ",
            steps.size(), " waiting:", waiting, "\n", grid(schedule, stuck));
}

}  // namespace pd2
