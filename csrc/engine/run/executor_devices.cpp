// What an executor does for its stages' devices: which stream waits for which, when receives are
// posted, and what time it was there.
#include "engine/run/executor.h"

#include <utility>

namespace pd2 {

Executor::Given Executor::given_here() const {
  Given given;
  for (const StageStreams* each : streams_) {
    given.push_back({Fence::here(each->device), Fence::of(each->inputs)});
  }
  return given;
}

void Executor::follow(const Given& given) const {
  for (std::size_t i = 0; i < streams_.size(); ++i) {
    for (const Fence& fence : given[i]) {
      fence.hold_back(streams_[i]->compute);
    }
  }
}

void Executor::join_here() const {
  for (const StageStreams* each : streams_) {
    each->join_here();
  }
}

void Executor::plan_receives(int wiring, const std::vector<StageEdge>& edges,
                             const std::vector<JointUpdate>& joint) {
  receives_.insert_or_assign(wiring, pd2::plan_receives(setup_.schedule, edges, joint));
}

// Before the action's own receives: what it posts here is under way, whatever those wait for.
void Executor::begin_action(int action, const Run* run, const Action& what) {
  posting_.action = action;
  posting_.is_done = false;
  if (posting_.early == nullptr) {
    return;
  }
  post(Moment::kBeforeUpdates);
  if (posting_.awaited != nullptr) {
    for (const AwaitedUpdate& each : *posting_.awaited) {
      if (each.action == action) {
        worker(each.stage).updates().finish();
      }
    }
    if (run != nullptr) {
      worker(what.stage).finish_updates_before(what.kind, *run, what.microbatch);
    }
  }
  post(Moment::kBefore);
}

void Executor::post_with_sends() {
  if (!std::exchange(posting_.is_done, true)) {
    post(Moment::kWithSends);
  }
}

void Executor::end_action() {
  post_with_sends();
  post(Moment::kAfterSends);
}

void Executor::post(Moment moment) {
  for (std::size_t i = 0; posting_.early != nullptr && i < posting_.early->size(); ++i) {
    const EarlyReceive& each = (*posting_.early)[i];
    if (each.action == posting_.action && each.moment == moment) {
      int microbatch = each.receive.microbatch;
      if (const Run* run = posting_.find(microbatch)) {
        worker(each.receive.to).post(*run, microbatch, each.receive.from);
      }
    }
  }
}

void Executor::record(bool on) {
  if (on) {
    clocks_.clear();
    for (const StageStreams* each : streams_) {
      // Not on `compute`, whose work the executor's thread may be recording as a graph.
      clocks_.emplace(each->device, each->inputs);
    }
  }
  recording_ = on;
}

std::vector<ExecutedAction> Executor::take_record() {
  std::vector<ExecutedAction> record;
  {
    const std::lock_guard lock(mutex_);
    record = std::exchange(record_, {});
  }
  for (ExecutedAction& action : record) {
    if (action.ended.is_of_device()) {
      const DeviceClock& clock = clocks_.at(worker(action.stage).streams().device);
      action.start = clock.time_of(action.begun);
      action.end = clock.time_of(action.ended);
    }
  }
  return record;
}

}  // namespace pd2
