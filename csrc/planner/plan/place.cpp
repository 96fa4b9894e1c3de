#include "planner/plan/place.h"

#include "core/infinity.h"

#include <algorithm>
#include <span>
#include <utility>

namespace pd2 {
namespace {

// Servers and meshes have three kinds of links at most. Measured links all differ and are not
// compared with each other.
void add_if_new(std::vector<Link>& links, const Link& link) {
  if (links.empty()) links.reserve(3);
  const auto end = links.begin() + std::min<std::ptrdiff_t>(std::ssize(links), 3);
  if (std::find(links.begin(), end, link) == end) links.push_back(link);
}

// Messages, each at the link between the two devices, and the time of adding up gradients.
void set_links(Evaluation& plan, GridLinks& links) {
  const PipelineShape& shape = plan.candidate.shape;
  Costs& costs = plan.costs;
  const auto set = [&](int from, int to, EdgeCosts& edge) {
    if (edge.message_bytes == 0) return;
    const Link link = links.slowest(from, to, edge.message_bytes);
    edge.latency = link.latency;
    edge.bandwidth = link.bandwidth;
    const double seconds = link.seconds(edge.message_bytes);
    PlannedStage& stage = plan.stages[from];
    if (seconds <= stage.message) return;
    stage.message = seconds;
    stage.receiver = to;
  };
  for (int k = 0; k < shape.depth(); ++k) {
    plan.stages[k].message = 0;
    plan.stages[k].receiver = k + 1;
    if (k + 1 < shape.depth()) set(k, k + 1, costs.edges[k]);
  }
  for (SkipCosts& skip : costs.skips) set(skip.from, skip.to, skip.edge);
  costs.stages.resize(shape.depth());
  for (int k = 0; k < shape.depth(); ++k) {
    PlannedStage& stage = plan.stages[k];
    const std::span<const int> devices = links.devices().of_rank(shape.rank_of(k));
    stage.devices.assign(devices.begin(), devices.end());
    stage.costs.all_reduce = links.all_reduce(k, stage.summed_bytes);
    costs.stages[k] = stage.costs;
  }
  plan.devices = links.devices();
}

}  // namespace

std::vector<Link> GridLinks::links_between(int from, int to) const {
  std::vector<Link> links;
  const int last = shape_.ranks - 1;
  const auto take = [&](int sender, int receiver) {
    for (int replica = 0; replica < devices_.width(); ++replica) {
      add_if_new(links, link_between(cluster_.topology, devices_.at(sender, replica),
                                     devices_.at(receiver, replica)));
    }
  };
  take(from, to);
  if (shape_.method->is_bidirectional()) take(last - from, last - to);
  return links;
}

Link GridLinks::slowest(int from, int to, double bytes) {
  const std::pair ranks(shape_.rank_of(from), shape_.rank_of(to));
  if (ranks.first == ranks.second) return {};
  if (devices_.width() == 1 && !shape_.method->is_bidirectional()) {
    return link_between(cluster_.topology, devices_.at(ranks.first, 0),
                        devices_.at(ranks.second, 0));
  }
  std::vector<Link>& links = messages_[ranks];
  if (links.empty()) links = links_between(ranks.first, ranks.second);
  return *std::ranges::max_element(links, {},
                                   [&](const Link& link) { return link.seconds(bytes); });
}

double GridLinks::all_reduce(int stage, double bytes) {
  Copies& copies = copies_[stage];
  if (copies.count == 0) {
    const int first = devices_.at(*shape_.ranks_of(stage).begin(), 0);
    int last = first;
    for (const int rank : shape_.ranks_of(stage)) {
      for (const int device : devices_.of_rank(rank)) {
        if (++copies.count > 1) {
          add_if_new(copies.links, link_between(cluster_.topology, last, device));
        }
        last = device;
      }
    }
    add_if_new(copies.links, link_between(cluster_.topology, last, first));
  }
  return all_reduce_seconds(cluster_, copies.count, copies.links, bytes);
}

StageHolders holders_of(const Cluster& cluster, const Candidate& candidate,
                        const DeviceGrid& devices) {
  const PipelineShape& shape = candidate.shape;
  const std::vector<DeviceType>& types = cluster.types;
  StageHolders holders;
  if (types.size() == 1) {
    holders.slowness.assign(shape.depth(), types.front().slowness);
    holders.limits.assign(shape.ranks, types.front().memory_bytes);
    return holders;
  }
  std::vector<double> slowness;
  holders.limits.assign(shape.ranks, kInfinity);
  for (int rank = 0; rank < shape.ranks; ++rank) {
    slowness.push_back(slowness_of_rank(cluster, devices, rank, candidate.microbatches));
    for (const int device : devices.of_rank(rank)) {
      holders.limits[rank] = std::min(holders.limits[rank], cluster.type(device).memory_bytes);
    }
  }
  for (int stage = 0; stage < shape.depth(); ++stage) {
    double slowest = 0;
    for (const int rank : shape.ranks_of(stage)) slowest = std::max(slowest, slowness[rank]);
    holders.slowness.push_back(slowest);
  }
  return holders;
}

Evaluation placed(const Candidate& candidate, ChosenStages stages, GridLinks& links) {
  Evaluation plan = {std::move(stages), candidate};
  set_links(plan, links);
  return plan;
}

void search_devices(const Cluster& cluster, Evaluation& plan) {
  const DeviceGrid before = plan.devices;
  const PipelineShape& shape = plan.candidate.shape;
  const auto place_on = [&](const DeviceGrid& devices) {
    GridLinks links(cluster, shape, devices);
    set_links(plan, links);
  };
  const double seconds_before = step_time(shape, plan.costs).seconds;
  const DeviceGrid found = search_mapping(cluster, before, [&](const DeviceGrid& devices) {
    place_on(devices);
    return period_by_formula(shape, plan.costs);
  });
  place_on(found);
  if (step_time(shape, plan.costs).seconds > seconds_before) place_on(before);
}

}  // namespace pd2
