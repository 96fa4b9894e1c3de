#include "engine/run/action_log.h"

#include "core/check.h"
#include "engine/clock.h"

#include <string>
#include <utility>

namespace pd2 {

void ActionLog::record(bool on, const std::vector<const StageStreams*>& streams) {
  if (on) {
    bases_.clear();
    for (const StageStreams* each : streams) {
      // Not on `compute`, whose work an executor's thread may be recording as a graph.
      const Fence fence = Fence::of(each->inputs, /*is_timed=*/true);
      fence.wait();
      bases_.emplace(each->device, Base{fence, now()});
    }
  }
  is_on_ = on;
}

void ActionLog::begin(ExecutedAction& action, c10::Device device) const {
  action.start = now();
  if (has_streams(device) && is_on_.load(std::memory_order_relaxed)) {
    action.begun = Fence::of(stream_here(device), /*is_timed=*/true);
  }
}

void ActionLog::end(ExecutedAction action, std::optional<double> sent_at) {
  if (!is_on_.load(std::memory_order_relaxed)) {
    return;
  }
  action.end = sent_at.value_or(now());
  if (action.begun.is_of_device()) {
    action.ended = Fence::of(stream_here(action.begun.device()), /*is_timed=*/true);
  }
  const std::lock_guard lock(mutex_);
  record_.push_back(std::move(action));
}

std::vector<ExecutedAction> ActionLog::take() {
  std::vector<ExecutedAction> record;
  {
    const std::lock_guard lock(mutex_);
    record = std::exchange(record_, {});
  }
  for (ExecutedAction& action : record) {
    if (action.ended.is_of_device()) {
      const auto& [fence, time] = bases_.at(action.ended.device());
      const auto time_of = [&](const Fence& event) {
        event.wait();
        return time + event.elapsed_since(fence);
      };
      action.start = time_of(action.begun);
      action.end = time_of(action.ended);
    }
  }
  return record;
}

ActionRange::ActionRange(const ExecutedAction& action, bool evaluates) {
  if (range_.isActive()) {
    const std::string what =
        evaluates ? "evaluation" : detail::concat(name_of(action.kind), " batch ", action.run);
    const std::string microbatch = action.kind == ActionKind::kUpdate
                                       ? std::string()
                                       : detail::concat(" microbatch ", action.microbatch);
    range_.before(detail::concat("pd2 stage ", action.stage, " ", what, microbatch, " version ",
                                 action.version));
  }
}

}  // namespace pd2
