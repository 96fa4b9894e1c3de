#include "core/plan/unequal.h"

#include "core/partition/replicated_split.h"

#include <algorithm>
#include <utility>

namespace pd2 {
namespace {

bool is_tried(const PlanProblem& problem) {
  const PlanOptions& options = problem.options;
  const std::int64_t layers = problem.model.num_layers();
  return problem.cluster.types.size() == 1 && options.width == 0 && options.num_stages == 0 &&
         problem.cluster.num_devices() > 1 &&
         layers * problem.cluster.num_devices() <= kMostLayersTimesDevices &&
         std::ranges::any_of(options.schedules, [](const std::string& name) {
           return !schedule_rule(name).is_flushed();
         });
}

// Messages at the mean of the links between neighbouring devices, all-reduces at the slowest.
void set_links(const Cluster& cluster, double gradient, ReplicationProblem& split) {
  const int devices = cluster.num_devices();
  for (int device = 1; device < devices; ++device) {
    const Link link = link_between(cluster.topology, device - 1, device);
    split.seconds_per_byte += 1 / link.bandwidth / (devices - 1);
    split.seconds_per_value += link.latency / (devices - 1);
    split.all_reduce_seconds_per_byte =
        std::max(split.all_reduce_seconds_per_byte, gradient / link.bandwidth);
    split.all_reduce_seconds_per_step = std::max(split.all_reduce_seconds_per_step, link.latency);
  }
}

ReplicationProblem without_rows(const PlanProblem& problem) {
  const PlanOptions& options = problem.options;
  ReplicationProblem split;
  split.can_cut = problem.model.can_cut;
  split.num_machines = problem.cluster.num_devices();
  split.trained = 2 + options.gradient + options.state;
  split.limit = problem.cluster.types.front().memory_bytes;
  set_links(problem.cluster, options.gradient, split);
  return split;
}

}  // namespace

std::optional<UnequalReplication> unequal_replication(const PlanProblem& problem, double worth) {
  std::optional<UnequalReplication> best;
  if (!is_tried(problem)) return best;
  const PlanOptions& options = problem.options;
  const double slowness = problem.cluster.types.front().slowness;
  ReplicationProblem split = without_rows(problem);
  for (const ProfiledRows& profiled : problem.model.microbatches) {
    split.num_microbatches = (options.batch + profiled.rows - 1) / profiled.rows;
    if (std::int64_t{profiled.rows} * split.num_microbatches > options.largest_batch) continue;
    split.layers = profiled.layers;
    split.edges = profiled.edges;
    split.values = profiled.shared;
    for (LayerCost& layer : split.layers) {
      for (double* cost : {&layer.forward, &layer.input_grad, &layer.weight_grad}) {
        *cost *= slowness;
      }
    }
    for (const Recompute recompute : options.recompute) {
      if (recompute == Recompute::kBlocks) continue;
      split.recompute = recompute == Recompute::kStages;
      std::optional<ReplicatedSplit> found = split_replicated(split);
      if (!found) continue;
      const double actions = 2 * problem.model.seconds_per_action;
      const double per_row = (found->slowest + actions) / profiled.rows;
      if (per_row >= worth) continue;
      worth = per_row;
      best = {std::move(found->replicas), per_row};
    }
  }
  return best;
}

}  // namespace pd2
