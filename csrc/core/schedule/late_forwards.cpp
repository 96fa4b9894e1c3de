#include "core/schedule/late_forwards.h"

#include "core/check.h"
#include "core/schedule/messages.h"
#include "core/schedule/unroll.h"
#include "core/schedule/walk.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>

namespace pd2 {
namespace {

using enum ActionKind;

// Of a slot: what begins as an update ends need not wait.
constexpr double kTolerance = 1e-6;

// A batch in the middle of a run, as the ranks' lists make them come to it.
struct Steady {
  std::vector<double> complete;             // by stage: when its gradients are
  std::vector<std::vector<double>> starts;  // by stage: of the forwards of all later batches
};

Steady steady_batch(const Schedule& schedule, const UpdateTime& update) {
  const int behind = most_batches_behind(schedule);
  const int batch = behind + 2;
  const int num_batches = batch + behind + 3;
  const auto seconds = [&](ActionKind kind) {
    if (kind == kForward) return update.forward;
    return kind == kBackward ? update.backward : update.backward / 2;
  };
  Steady steady{std::vector<double>(schedule.num_stages),
                std::vector<std::vector<double>>(schedule.num_stages)};
  std::vector<double> free_at(schedule.ranks.size(), 0);
  Arrivals arrivals({schedule,
                     chain_of(schedule.depth()),
                     {0, std::int64_t{schedule.num_microbatches} * num_batches}});
  const auto run = [&](const Step& step) {
    double& now = free_at[schedule.placement[step.stage]];
    const int of = batch_of(step.microbatch, schedule.num_microbatches);
    if (step.kind == kUpdate) {
      if (of == batch) steady.complete[step.stage] = now;
      return;
    }
    now = arrivals.latest(step, now);
    if (step.kind == kForward && of > batch) steady.starts[step.stage].push_back(now);
    now += seconds(step.kind);
    arrivals.send(step, [&](int) { return now; });
  };
  walk(
      schedule, unroll(schedule, 0, num_batches),
      [&](const Step& step) { return arrivals.missing(step); }, run);
  return steady;
}

// A stage of several groups waits for all of them, and so do those that wait for it.
void wait_for_each_other(std::vector<double>& complete, const std::vector<JointUpdate>& joint) {
  for (std::size_t round = 0; round < joint.size(); ++round) {
    for (const JointUpdate& stages : joint) {
      double last = 0;
      for (const int stage : stages) last = std::max(last, complete[stage]);
      for (const int stage : stages) complete[stage] = last;
    }
  }
}

}  // namespace

UpdateTime update_of_slots(const Schedule& schedule, int slots, std::vector<JointUpdate> joint,
                           double backward) {
  PD2_CHECK(slots >= 1, "update_slots: ", slots, ": an update takes 1 at least");
  std::vector<double> seconds(schedule.num_stages, slots * (1 + backward));
  return {std::move(seconds), std::move(joint), 1, backward};
}

std::vector<int> late_forwards(const Schedule& schedule, const UpdateTime& update) {
  for (const int delay : schedule.delay) {
    PD2_CHECK(delay == 1, "schedule: ", schedule.name, ", delay: ", delay,
              ": some forwards alone are late where the delay is 1");
  }
  Steady steady = steady_batch(schedule, update);
  wait_for_each_other(steady.complete, update.joint);
  const double slot = update.forward + update.backward;
  std::vector<int> late;
  for (int stage = 0; stage < schedule.num_stages; ++stage) {
    const std::vector<double>& starts = steady.starts[stage];
    const double end = steady.complete[stage] + update.seconds[stage] - slot * kTolerance;
    late.push_back(
        static_cast<int>(std::ranges::count_if(starts, [&](double start) { return start < end; })));
    if (starts.back() < end) {  // beyond what has been looked at, one in each slot
      late.back() += static_cast<int>(std::ceil((end - starts.back()) / slot)) - 1;
    }
  }
  return late;
}

}  // namespace pd2
