// Looks for better cuts of placed plans: Evaluator::refine().

#include "core/schedule/generate.h"
#include "planner/plan/evaluate.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace pd2 {
namespace {

constexpr int kMostTries = 400;            // of cuts
constexpr double kMostTriedActions = 4e4;  // of these tries, where they are simulated
constexpr int kFewestTries = 20;           // below this, skip the search
constexpr int kReach = 4;                  // pieces that a cut is moved by at most
constexpr int kMostMoved = 8;              // cuts at once
constexpr std::size_t kMostStarts = 3;
// A flush wastes ranks - 1 microbatches' time. In longer batches the slowest stage decides, and the
// split by it is the best one.
constexpr int kShortBatch = 4;  // microbatches a rank
constexpr double kUneven = 1.01;

double by_formula(const Evaluation& plan) {
  return period_by_formula(plan.candidate.shape, plan.costs);
}

// How many cuts may be tried if two batches are simulated for each.
int simulated_tries(const PipelineShape& shape) {
  const double actions =
      2.0 * shape.num_microbatches * shape.depth() * (shape.method->is_split + 2);
  return static_cast<int>(kMostTriedActions / actions);
}

bool has_exposed_all_reduce(const Evaluation& plan) {
  double longest = 0;
  double work = 0;
  for (const StageCosts& stage : plan.costs.stages) {
    longest = std::max(longest, stage.all_reduce);
    work += stage.work() * plan.candidate.shape.num_microbatches;
  }
  return longest > kFreeMessage * work / plan.candidate.shape.depth();
}

// Whether ranks of a V wait for each other or for the busiest one while nothing drains.
bool waits_in_a_v(const Evaluation& plan) {
  const PipelineShape& shape = plan.candidate.shape;
  if (!shape.method->is_v()) return false;
  double work = 0;
  for (const StageCosts& stage : plan.costs.stages) work += stage.work();
  const double each = seconds_per_microbatch_of_v(shape, plan.costs);
  return each >= kUneven * work / shape.ranks;
}

template <typename Seconds>
void keep_best(std::vector<Evaluation>& plans, std::size_t most, Seconds&& seconds) {
  std::vector<std::pair<double, std::size_t>> order;
  for (std::size_t i = 0; i < plans.size(); ++i) order.emplace_back(seconds(plans[i]), i);
  std::ranges::sort(order);
  if (order.size() > most) order.resize(most);
  std::vector<Evaluation> kept;
  for (const auto& [_, i] : order) kept.push_back(std::move(plans[i]));
  plans = std::move(kept);
}

}  // namespace

bool Evaluator::has_exposed_message(const Evaluation& plan, GridLinks& links) const {
  const PipelineShape& shape = plan.candidate.shape;
  const double bytes = chooser_.largest_message(plan.candidate);
  double slowest = 0;
  for (int k = 0; k + 1 < shape.depth(); ++k) {
    slowest = std::max(slowest, links.slowest(k, k + 1, bytes).seconds(bytes));
  }
  return chooser_.is_message_exposed(plan.candidate, slowest);
}

bool Evaluator::may_refine(const Evaluation& plan, GridLinks& links) const {
  const PipelineShape& shape = plan.candidate.shape;
  if (shape.ranks == 1 || chooser_.num_pieces() > kMostPiecesForRanks) return false;
  if (plan.candidate.recompute == Recompute::kBlocks) return false;
  const bool is_short =
      shape.method->is_flushed() && shape.num_microbatches <= kShortBatch * shape.ranks;
  const bool may_try = has_exact_formula(*shape.method) || simulated_tries(shape) >= kFewestTries;
  return ((is_short || waits_in_a_v(plan)) && may_try) || has_exposed_message(plan, links) ||
         has_exposed_all_reduce(plan);
}

void Evaluator::refine(std::vector<Evaluation>& plans, const StageHolders& holders) const {
  const Candidate candidate = plans.front().candidate;
  const PipelineShape& shape = candidate.shape;
  const bool is_matrix = std::holds_alternative<LinkMatrix>(problem_.cluster.topology);
  if (is_matrix) {
    for (Evaluation& plan : plans) search_devices(problem_.cluster, plan);
  }
  keep_best(plans, kMostStarts, by_formula);
  const bool is_exact = has_exact_formula(*shape.method);
  if (is_exact || simulated_tries(shape) < kFewestTries) {
    std::vector<Evaluation> moved = plans;
    for (Evaluation& plan : moved) {
      move_cuts(plan, holders, kMostTries / static_cast<int>(moved.size()), by_formula);
    }
    std::swap(plans, moved);
    // An estimate may have led astray.
    if (!is_exact) std::ranges::move(moved, std::back_inserter(plans));
    return keep_best(plans, kMostStarts, by_formula);
  }
  const int num_tries = simulated_tries(shape) - static_cast<int>(plans.size());
  const Schedule schedule = make_schedule(shape.method->name, shape.depth(), shape.num_microbatches,
                                          shape.stages_per_rank);
  const auto simulated = [&](const Evaluation& plan) { return second_batch(schedule, plan.costs); };
  keep_best(plans, kMostStarts, simulated);
  for (Evaluation& plan : plans) {
    move_cuts(plan, holders, num_tries / static_cast<int>(plans.size()), simulated);
  }
}

// Takes every move that saves time, until none does or num_tries were tried. One cut is moved by a
// few pieces, or several neighbouring ones by one, which moves a piece between the stages around
// them.
void Evaluator::move_cuts(Evaluation& plan, const StageHolders& holders, int num_tries,
                          const std::function<double(const Evaluation&)>& seconds) const {
  const std::vector<int>& positions = chooser_.positions();
  std::vector<int> cuts;  // as positions, with both ends of the model
  for (const PlannedStage& stage : plan.stages) {
    const auto place = std::ranges::lower_bound(positions, stage.first);
    cuts.push_back(static_cast<int>(place - positions.begin()));
  }
  cuts.push_back(static_cast<int>(positions.size()) - 1);
  const int num_stages = static_cast<int>(plan.stages.size());
  double least = num_tries > 0 ? seconds(plan) : 0;
  const DeviceGrid devices = plan.devices;
  GridLinks links(problem_.cluster, plan.candidate.shape, devices);
  // Moves the cuts before stages first .. last if that saves time; returns whether it did.
  const auto moves = [&](int first, int last, int by) {
    const bool keeps_order = cuts[first - 1] < cuts[first] + by && cuts[last] + by < cuts[last + 1];
    if (num_tries <= 0 || !keeps_order) return false;
    --num_tries;
    std::vector<int> firsts = first_layers(plan.stages);
    for (int k = first; k <= last; ++k) firsts[k] = positions[cuts[k] + by];
    auto stages = chooser_.stages_of(plan.candidate, holders, firsts);
    if (!stages) return false;
    Evaluation other = placed(plan.candidate, *std::move(stages), links);
    const double now = seconds(other);
    if (now >= least * (1 - 1e-9)) return false;
    least = now;
    plan = std::move(other);
    for (int k = first; k <= last; ++k) cuts[k] += by;
    return true;
  };
  for (bool has_moved = true; has_moved && num_tries > 0;) {
    has_moved = false;
    for (int first = 1; first < num_stages; ++first) {
      for (int by = -kReach; by <= kReach; ++by) {
        if (by != 0) has_moved = moves(first, first, by) || has_moved;
      }
    }
    for (int first = 1; first < num_stages && !has_moved; ++first) {
      for (int last = first + 1; last < std::min(num_stages, first + kMostMoved); ++last) {
        for (const int by : {-1, 1}) has_moved = moves(first, last, by) || has_moved;
      }
    }
  }
}

}  // namespace pd2
