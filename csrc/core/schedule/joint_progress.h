// How far the updates that wait for each other have come while one list of all ranks is run.
//
// An update tells other stages something (a norm, tied gradients) that the host reads from the
// device, at a time of its own: at the latest when its rank waits for the update to be over. So it
// counts as told only then, and whoever waits, waits for all stages that are joined with his.

#pragma once

#include "core/schedule/global_updates.h"
#include "core/schedule/schedule.h"

#include <optional>
#include <vector>

namespace pd2 {

// An update that a rank waits for before an action of the list that is being run, or after the last
// one: that of `stage` which is under way then.
struct AwaitedUpdate {
  int action = 0;
  int stage = 0;

  auto operator<=>(const AwaitedUpdate&) const = default;
};

// By rank.
using AwaitedUpdates = std::vector<std::vector<AwaitedUpdate>>;

// Batches are told as the list's microbatches are: 0 for the list's own.
class JointProgress {
 public:
  // Stages that wait for each other through others are joined, too. `joint` is about all stages of
  // the schedule, those of both pipelines.
  JointProgress(const Schedule& schedule, const std::vector<JointUpdate>& joint);

  // A prologue's: no update is under way. Else of a steady list, or of the epilogue behind one, for
  // which all told at that list's end what they wait for in it, those in `at_end` even all they had
  // begun.
  void begin_steady(const AwaitedUpdates& at_end);
  void begin_epilogue(const AwaitedUpdates& at_end);

  // The batch whose update must be over before the action is done; none if that is nobody else's
  // matter: the one whose version a forward reads, the one before an update.
  std::optional<int> needed_by(const Action& action) const;
  void begin_update(const Action& action);
  // The stage's rank waits for its updates up to that batch: it and all that are joined with it on
  // the same rank have told what they know. Whether that is new to anybody.
  bool tell(int stage, int batch);
  bool is_over(int stage, int batch) const;

  // The stages of other ranks that could tell something of that batch, which `stage` waits for.
  std::vector<int> untold(int stage, int batch) const;
  // The last that has begun.
  int begun(int stage) const { return begun_[stage]; }

 private:
  int last_needed(int stage) const;

  const Schedule& schedule_;
  std::vector<std::vector<int>> joined_;  // by stage: all with it, itself too; empty: none
  std::vector<int> begun_, told_;         // by stage: the last batch
};

}  // namespace pd2
