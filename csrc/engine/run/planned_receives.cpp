#include "engine/run/planned_receives.h"

#include "engine/run/stage_worker.h"

#include <cstddef>
#include <utility>

namespace pd2 {

void PlannedReceives::plan(int wiring, const std::vector<StageEdge>& edges,
                           const std::vector<JointUpdate>& joint) {
  plans_.insert_or_assign(wiring, plan_receives(setup_.schedule, edges, joint));
}

void PlannedReceives::begin(int wiring, std::optional<ListKind> list, FindRun find) {
  early_ = nullptr;
  awaited_ = nullptr;
  find_run_ = std::move(find);
  if (const auto plan = plans_.find(wiring); plan != plans_.end()) {
    const ReceivePlan& found = plan->second;
    early_ = list ? &found.of(setup_.rank, *list) : &found.evaluation.at(setup_.rank);
    awaited_ = list ? &found.awaited[static_cast<std::size_t>(*list)].at(setup_.rank) : nullptr;
  }
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
