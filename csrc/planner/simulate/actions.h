// What actions and messages of a simulated run cost, and how an action is told.

#pragma once

#include "core/schedule/unroll.h"
#include "planner/simulate/simulate.h"

#include <algorithm>

namespace pd2 {

// The copies of a stage cost the same.
inline const StageCosts& cost_of(const Schedule& schedule, const Costs& costs, int stage) {
  return costs.stages[stage % schedule.depth()];
}

inline double seconds(const StageCosts& stage, ActionKind kind) {
  switch (kind) {
    case ActionKind::kForward:
      return stage.forward;
    case ActionKind::kBackward:
      return stage.input_grad + stage.weight_grad;
    case ActionKind::kInputGrad:
      return stage.input_grad;
    case ActionKind::kWeightGrad:
      return stage.weight_grad;
    case ActionKind::kUpdate:
      return stage.all_reduce + stage.update;
    case ActionKind::kRecompute:
      return stage.recompute;
  }
  return 0;
}

// For how long a message keeps its edge busy.
inline double seconds(const EdgeCosts& edge) {
  return edge.bandwidth > 0 ? edge.message_bytes / edge.bandwidth : 0;
}

// By a forward or a backward.
inline int version_read(const Schedule& schedule, const Step& step) {
  const int batch = batch_of(step.microbatch, schedule.num_microbatches);
  return std::max(batch - schedule.delay[step.stage], 0);
}

inline SimulatedAction simulated(const Schedule& schedule, const Step& step, double start,
                                 double end) {
  const int m = schedule.num_microbatches;
  const int batch = batch_of(step.microbatch, m);
  const bool is_update = step.kind == ActionKind::kUpdate;
  return {.stage = step.stage,
          .kind = step.kind,
          .batch = batch,
          .microbatch = is_update ? m - 1 : static_cast<int>(step.microbatch % m),
          .version = is_update ? batch + 1 : version_read(schedule, step),
          .start = start,
          .end = end};
}

}  // namespace pd2
