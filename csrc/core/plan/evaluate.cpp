#include "core/plan/evaluate.h"

#include <algorithm>
#include <utility>

namespace pd2 {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Of a plan whose time by formula is so many times the worth no better cuts are looked for. They
// made random plans up to 1.7 times as fast at the very most: the result hardly depends on it.
constexpr double kMostSaved = 2;

// Of a batch, of the slowest stage: its ranks' work at least.
double seconds_of_slowest(const PipelineShape& shape, const ChosenStages& stages) {
  double slowest = 0;
  for (const PlannedStage& stage : stages.stages) {
    slowest = std::max(slowest, work_of(stage.costs));
  }
  // The split is exact up to rounding.
  return 0.999'999 * slowest * shape.num_microbatches * (shape.rule->is_bidirectional ? 0.5 : 1);
}

}  // namespace

Start start_of(const PlanProblem& problem, const DeviceGrid& devices, double seconds_per_row) {
  const PlanOptions& options = problem.options;
  const double hours = seconds_per_row / 3600 * options.num_batches * options.batch;
  return cheapest_start(problem.cluster, devices.devices(), hours, options.start_within);
}

Evaluator::Evaluator(const PlanProblem& problem, const Layouts& layouts)
    : problem_(problem), layouts_(layouts), bounds_(problem), chooser_(problem, layouts) {}

// Messages, each at the link between the two devices, and the time of adding up gradients.
void Evaluator::set_links(Evaluation& plan, GridLinks& links) const {
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
    const std::span<const int> devices = links.devices().of_rank(k % shape.ranks);
    stage.devices.assign(devices.begin(), devices.end());
    stage.costs.all_reduce = links.all_reduce(k, stage.costs.gradient_bytes);
    costs.stages[k] = stage.costs;
  }
  plan.devices = links.devices();
}

void Evaluator::search_devices(Evaluation& plan) const {
  const DeviceGrid before = plan.devices;
  const PipelineShape& shape = plan.candidate.shape;
  const auto place_on = [&](const DeviceGrid& devices) {
    GridLinks links(problem_.cluster, shape, devices);
    set_links(plan, links);
  };
  const double seconds_before = step_time(shape, plan.costs).seconds;
  const DeviceGrid found = search_mapping(problem_.cluster, before, [&](const DeviceGrid& devices) {
    place_on(devices);
    return closed_form_period(shape, plan.costs);
  });
  place_on(found);
  if (step_time(shape, plan.costs).seconds > seconds_before) place_on(before);
}

double Evaluator::score(const Candidate& candidate, const DeviceGrid& devices,
                        double seconds) const {
  const PlanOptions& options = problem_.options;
  const double per_row = seconds / candidate.batch();
  if (options.objective != Objective::kCost) return per_row;
  if (options.num_batches == 0) {
    return per_row / 3600 * price_per_hour_now(problem_.cluster, devices.devices());
  }
  return start_of(problem_, devices, per_row).price / (options.num_batches * options.batch);
}

StageHolders Evaluator::holders_of(const PipelineShape& shape, const DeviceGrid& devices) const {
  const std::vector<DeviceType>& types = problem_.cluster.types;
  StageHolders holders;
  if (types.size() == 1) {
    holders.slowness.assign(shape.depth(), types.front().slowness);
    holders.limits.assign(shape.ranks, types.front().memory_bytes);
    return holders;
  }
  std::vector<double> slowness(shape.ranks, 0);
  holders.limits.assign(shape.ranks, kInfinity);
  for (int rank = 0; rank < shape.ranks; ++rank) {
    for (const int device : devices.of_rank(rank)) {
      const DeviceType& type = problem_.cluster.type(device);
      slowness[rank] = std::max(slowness[rank], type.slowness);
      holders.limits[rank] = std::min(holders.limits[rank], type.memory_bytes);
    }
  }
  for (int stage = 0; stage < shape.depth(); ++stage) {
    double slowest = 0;
    for (const int rank : shape.ranks_of(stage)) slowest = std::max(slowest, slowness[rank]);
    holders.slowness.push_back(slowest);
  }
  return holders;
}

std::optional<Evaluation> Evaluator::evaluate(const Candidate& candidate, double worth) {
  const PipelineShape& shape = candidate.shape;
  const DeviceGrid devices = layouts_.grid(candidate.layout, shape.ranks, candidate.width);
  const StageHolders holders = holders_of(shape, devices);
  const bool is_timed = problem_.options.objective != Objective::kCost;
  const bool is_matrix = std::holds_alternative<LinkMatrix>(problem_.cluster.topology);
  const double seconds = is_timed ? worth * candidate.batch() : kInfinity;
  GridLinks links(problem_.cluster, shape, devices);
  std::vector<Evaluation> plans;
  bool is_refined = false;
  for (ChosenStages& stages : chooser_.choose(candidate, holders, seconds)) {
    if (stages.is_fastest &&
        score(candidate, devices, seconds_of_slowest(shape, stages)) >= worth) {
      return std::nullopt;
    }
    plans.push_back(placed(candidate, std::move(stages), links));
    is_refined = is_refined || may_refine(plans.back(), links);
  }
  if (is_refined && !is_matrix) {
    double least = kInfinity;
    for (const Evaluation& plan : plans) {
      least = std::min(least, closed_form_period(shape, plan.costs));
    }
    is_refined = score(candidate, devices, least / kMostSaved) < worth;
  }
  if (is_refined) refine(plans, holders);
  std::optional<Evaluation> best;
  for (Evaluation& plan : plans) {
    const double least = least_seconds(plan);
    if (score(candidate, plan.devices, least) >= worth) continue;
    if (!is_refined && is_matrix) search_devices(plan);
    set_time(plan, least);
    if (!best || plan.score < best->score) best = std::move(plan);
  }
  return best;
}

Evaluation Evaluator::placed(const Candidate& candidate, ChosenStages stages,
                             GridLinks& links) const {
  Evaluation plan;
  plan.candidate = candidate;
  plan.stages = std::move(stages.stages);
  plan.costs.edges = std::move(stages.edges);
  plan.costs.skips = std::move(stages.skips);
  plan.peak_bytes = stages.peak_bytes;
  set_links(plan, links);
  return plan;
}

// With whatever links.
double Evaluator::least_seconds(const Evaluation& plan) const {
  const PipelineShape& shape = plan.candidate.shape;
  const double speed = layouts_.speed(plan.candidate.layout, shape.ranks, plan.candidate.width);
  Costs without_links = plan.costs;
  for (StageCosts& stage : without_links.stages) stage.all_reduce = 0;
  return std::max(bounds_.seconds(plan.candidate, speed), busiest_rank(shape, without_links));
}

void Evaluator::set_time(Evaluation& plan, double least) const {
  const PipelineShape& shape = plan.candidate.shape;
  plan.time = step_time(shape, plan.costs);
  if (least > plan.time.seconds) {
    plan.time = {least, 1 - busiest_rank(shape, plan.costs) / least};
  }
  plan.score = score(plan.candidate, plan.devices, plan.time.seconds);
}

double Evaluator::least_memory(const Candidate& candidate) const {
  const PipelineShape& shape = candidate.shape;
  const DeviceGrid devices = layouts_.grid(candidate.layout, shape.ranks, candidate.width);
  return chooser_.least_memory(candidate, holders_of(shape, devices));
}

}  // namespace pd2
