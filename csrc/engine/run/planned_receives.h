// Receives that are posted before their actions, as a plan says.
#pragma once

#include "core/schedule/receives.h"
#include "engine/run/run.h"

#include <functional>
#include <map>
#include <optional>
#include <vector>

namespace pd2 {

class StageWorker;

// For channels that post none by themselves: see plan_receives(). Without a plan for its wiring an
// executor's list costs a look at each action. Used by the executor's thread.
class PlannedReceives {
 public:
  // The stage's worker. Throws ValueError if the executor does not run it.
  using FindWorker = std::function<StageWorker&(int stage)>;
  // Gives the run of a microbatch of a list, and its number there; or null.
  using FindRun = std::function<const Run*(int& microbatch)>;

  PlannedReceives(const ExecutorSetup& setup, FindWorker find_worker)
      : setup_(setup), find_worker_(std::move(find_worker)) {}

  // `edges` and `joint` as plan_receives() has them, which may throw ValueError.
  void plan(int wiring, const std::vector<StageEdge>& edges, const std::vector<JointUpdate>& joint);

  // A list is executed next; none: an evaluation of a microbatch.
  void begin(int wiring, std::optional<ListKind> list, FindRun find);

  // These post the receives that belong there: the second once, the last one too. The first one
  // waits for updates in between, as the plan asks for. `run`: of `what`, the action; null: it is
  // skipped, or the list is over.
  void begin_action(int action, const Run* run = nullptr, const Action& what = {});
  void post_with_sends();
  void end_action();

 private:
  void post(Moment moment);

  const ExecutorSetup& setup_;
  const FindWorker find_worker_;
  std::map<int, ReceivePlan> plans_;  // by wiring
  // Of what is being executed: its part of the plan, the action, and whether the receives that
  // belong to its sends have been posted.
  const std::vector<EarlyReceive>* early_ = nullptr;  // null: channels post theirs by themselves
  const std::vector<AwaitedUpdate>* awaited_ = nullptr;
  FindRun find_run_;
  int action_ = 0;
  bool is_done_ = true;
};

}  // namespace pd2
