#include "core/schedule/global_updates.h"

#include "core/check.h"
#include "core/schedule/messages.h"
#include "core/schedule/walk.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <optional>
#include <set>

namespace pd2 {

using enum ActionKind;

void check_joint_updates(const Schedule& schedule, const std::vector<JointUpdate>& joint,
                         std::string_view why) {
  std::vector<std::set<int>> joined(schedule.num_stages);  // by stage: those it waits for
  for (const JointUpdate& stages : joint) {
    for (const int stage : stages) joined[stage].insert(stages.begin(), stages.end());
  }
  const int num_batches = most_batches_behind(schedule) + 4;
  Arrivals arrivals({schedule,
                     chain_of(schedule.depth()),
                     {0, std::int64_t{schedule.num_microbatches} * num_batches}});
  std::vector<int> updates(schedule.num_stages, 0);  // by stage: to how many it has come
  const auto behind = [&](int stage, int version) -> std::optional<int> {
    const auto late =
        std::ranges::find_if(joined[stage], [&](int other) { return updates[other] < version; });
    if (late == joined[stage].end()) return std::nullopt;
    return *late;
  };
  const auto waits_for = [&](const Step& step) -> std::optional<int> {
    const int batch = batch_of(step.microbatch, schedule.num_microbatches);
    // One update of a stage after the other.
    if (step.kind == kUpdate) return behind(step.stage, batch);
    if (step.kind == kForward) {
      const auto late = behind(step.stage, batch - schedule.delay_at(step.stage, step.microbatch));
      if (late) return late;
    }
    return arrivals.missing(step);
  };
  const std::vector<std::vector<Step>> steps = unroll(schedule, 0, num_batches);
  const auto done = walk(schedule, steps, waits_for, [&](const Step& step) {
    updates[step.stage] += step.kind == kUpdate;
    arrivals.send(step, [](int) { return 0; });
  });
  check_finished(schedule, steps, done, why, "waiting", [&](const Step& step) {
    return detail::concat("stage ", waits_for(step).value());
  });
}

void check_global_updates(const Schedule& schedule) {
  JointUpdate all(schedule.num_stages);
  std::iota(all.begin(), all.end(), 0);
  check_joint_updates(schedule, {all},
                      "clipping by norm needs every stage's gradients of batch t before any stage "
                      "reads version t + 1");
}

}  // namespace pd2
