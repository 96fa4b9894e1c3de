#include "planner/plan/evaluate.h"

#include "core/infinity.h"

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

namespace pd2 {
namespace {

// A plan whose time by formula exceeds the worth by this factor keeps its cuts. Better cuts made
// random plans up to 1.7 times as fast: the result hardly depends on this.
constexpr double kMostSaved = 2;

// The least seconds of a batch: the work of the slowest stage's ranks.
double seconds_of_slowest(const PipelineShape& shape, const ChosenStages& stages) {
  double slowest = 0;
  for (const PlannedStage& stage : stages.stages) {
    slowest = std::max(slowest, stage.costs.work());
  }
  // The split is exact up to rounding.
  return 0.999'999 * slowest * shape.microbatches_of_copy();
}

// Of replicas with different numbers of microbatches: each one's pipeline, of those that are alike
// one. The plan's costs are with slowness_of_rank().
std::vector<std::pair<PipelineShape, Costs>> replicas_of(const PlanProblem& problem,
                                                         const Evaluation& plan) {
  const std::vector<int>& microbatches = plan.candidate.microbatches;
  const double action = problem.model.seconds_per_action;
  const PipelineShape& shape = plan.candidate.shape;
  std::vector<double> of_ranks;
  for (int rank = 0; rank < shape.ranks; ++rank) {
    of_ranks.push_back(slowness_of_rank(problem.cluster, plan.devices, rank, microbatches));
  }
  std::set<std::pair<int, std::vector<double>>> known;
  std::vector<std::pair<PipelineShape, Costs>> replicas;
  for (int replica = 0; replica < plan.candidate.width; ++replica) {
    std::vector<double> slowness;
    for (int rank = 0; rank < shape.ranks; ++rank) {
      slowness.push_back(problem.cluster.type(plan.devices.at(rank, replica)).slowness);
    }
    if (!known.emplace(microbatches[replica], slowness).second) continue;
    auto& [own_shape, costs] = replicas.emplace_back(shape, plan.costs);
    own_shape.num_microbatches = microbatches[replica];
    for (int stage = 0; stage < shape.depth(); ++stage) {
      const int rank = shape.rank_of(stage);
      const double times = slowness[rank] / of_ranks[rank];
      StageCosts& cost = costs.stages[stage];
      const auto scale = [&](double& seconds, double fixed) {
        seconds = fixed + times * (seconds - fixed);
      };
      scale(cost.forward, action);
      scale(cost.input_grad, action);
      scale(cost.weight_grad, shape.method->is_split ? action : 0);
      scale(cost.recompute, 0);
      scale(cost.update, 0);
    }
  }
  return replicas;
}

}  // namespace

Start start_of(const PlanProblem& problem, const DeviceGrid& devices, double seconds_per_row) {
  const PlanOptions& options = problem.options;
  const double hours = seconds_per_row / 3600 * options.num_batches * options.batch;
  return cheapest_start(problem.cluster, devices.devices(), hours, options.start_within);
}

Evaluator::Evaluator(const PlanProblem& problem, const DeviceMappings& mappings)
    : problem_(problem), mappings_(mappings), bounds_(problem), chooser_(problem, mappings) {}

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

std::optional<Evaluation> Evaluator::evaluate(const Candidate& candidate, double worth) {
  const PipelineShape& shape = candidate.shape;
  const DeviceGrid devices = mappings_.grid(candidate.mapping, shape.ranks, candidate.width);
  const StageHolders holders = holders_of(problem_.cluster, candidate, devices);
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
      least = std::min(least, period_by_formula(shape, plan.costs));
    }
    is_refined = score(candidate, devices, least / kMostSaved) < worth;
  }
  if (is_refined) refine(plans, holders);
  std::optional<Evaluation> best;
  for (Evaluation& plan : plans) {
    const double least = least_seconds(plan);
    if (score(candidate, plan.devices, least) >= worth) continue;
    if (!is_refined && is_matrix) search_devices(problem_.cluster, plan);
    set_time(plan, least);
    if (!best || plan.score < best->score) best = std::move(plan);
  }
  return best;
}

// The least seconds of a batch with any links.
double Evaluator::least_seconds(const Evaluation& plan) const {
  const PipelineShape& shape = plan.candidate.shape;
  const double speed = mappings_.speed(plan.candidate.mapping, shape.ranks, plan.candidate.width,
                                       plan.candidate.microbatches);
  Costs without_links = plan.costs;
  for (StageCosts& stage : without_links.stages) stage.all_reduce = 0;
  return std::max(bounds_.seconds(plan.candidate, speed), busiest_rank(shape, without_links));
}

void Evaluator::set_time(Evaluation& plan, double least) const {
  const PipelineShape& shape = plan.candidate.shape;
  if (plan.candidate.microbatches.empty()) {
    plan.time = step_time(shape, plan.costs);
  } else {
    for (const auto& [of_replica, costs] : replicas_of(problem_, plan)) {
      least = std::max(least, step_time(of_replica, costs).seconds);
    }
  }
  if (least > plan.time.seconds) {
    plan.time = {least, 1 - busiest_rank(shape, plan.costs) / least};
  }
  plan.score = score(plan.candidate, plan.devices, plan.time.seconds);
}

}  // namespace pd2
