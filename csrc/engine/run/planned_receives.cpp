#include "engine/run/planned_receives.h"

#include "engine/run/stage_worker.h"

#include <cstddef>
#include <utility>

namespace pd2 {

void PlannedReceives::plan(int wiring, const std::vector<StageEdge>& edges,
                           const std::vector<JointUpdate>& joint) {
  plans_.insert_or_assign(wiring, plan_receives(setup_.schedule, edges, joint));
}

void PlannedReceives::begin_list(int wiring, ListKind list, FindRun find) {
  const auto plan = plans_.find(wiring);
  const bool is_planned = plan != plans_.end();
  early_ = is_planned ? &plan->second.of(setup_.rank, list) : nullptr;
  awaited_ =
      is_planned ? &plan->second.awaited[static_cast<std::size_t>(list)].at(setup_.rank) : nullptr;
  find_run_ = std::move(find);
}

void PlannedReceives::begin_evaluation(int wiring, FindRun find) {
  const auto plan = plans_.find(wiring);
  early_ = plan == plans_.end() ? nullptr : &plan->second.evaluation.at(setup_.rank);
  awaited_ = nullptr;
  find_run_ = std::move(find);
}

// Before the action's own receives: what it posts here is under way, whatever those wait for.
void PlannedReceives::begin_action(int action, const Run* run, const Action& what) {
  action_ = action;
  is_done_ = false;
  if (early_ == nullptr) {
    return;
  }
  post(Moment::kBeforeUpdates);
  if (awaited_ != nullptr) {
    for (const AwaitedUpdate& each : *awaited_) {
      if (each.action == action) {
        find_worker_(each.stage).updates().finish();
      }
    }
    if (run != nullptr) {
      find_worker_(what.stage).finish_updates_before(what.kind, *run, what.microbatch);
    }
  }
  post(Moment::kBefore);
}

void PlannedReceives::post_with_sends() {
  if (!std::exchange(is_done_, true)) {
    post(Moment::kWithSends);
  }
}

void PlannedReceives::end_action() {
  post_with_sends();
  post(Moment::kAfterSends);
}

void PlannedReceives::post(Moment moment) {
  for (std::size_t i = 0; early_ != nullptr && i < early_->size(); ++i) {
    const EarlyReceive& each = (*early_)[i];
    if (each.action == action_ && each.moment == moment) {
      int microbatch = each.receive.microbatch;
      if (const Run* run = find_run_(microbatch)) {
        find_worker_(each.receive.to).post(*run, microbatch, each.receive.from);
      }
    }
  }
}

}  // namespace pd2
