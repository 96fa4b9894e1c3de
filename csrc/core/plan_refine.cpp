// Other splits of a candidate whose devices, and so whose links, are known.

#include "core/plan_evaluate.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace pd2 {
namespace {

constexpr int kMostTries = 1000;  // of cuts, by closed form
constexpr int kReach = 4;         // pieces that a cut is moved by at most
constexpr std::size_t kMostStarts = 3;

double by_closed_form(const Evaluation& plan) {
  return closed_form_period(plan.candidate.shape, plan.costs);
}

double by_simulation(const Evaluation& plan) {
  return step_time(plan.candidate.shape, plan.costs).seconds;
}

// The best by closed form, at most so many.
void keep_best(std::vector<Evaluation>& plans, std::size_t most) {
  std::ranges::stable_sort(plans, {}, by_closed_form);
  if (plans.size() > most) plans.resize(most);
}

}  // namespace

bool Evaluator::may_refine(const Evaluation& plan) const {
  if (plan.candidate.shape.ranks == 1 || chooser_.num_pieces() > kMostPiecesForRanks) return false;
  if (plan.candidate.recompute == Recompute::kBlocks) return false;
  const PipelineShape& shape = plan.candidate.shape;
  const double bytes = chooser_.largest_message(plan.candidate);
  double slowest = 0;
  for (int k = 0; k + 1 < shape.depth(); ++k) {
    const Link link = slowest_link(shape, plan.devices, k, k + 1, bytes);
    slowest = std::max(slowest, link.seconds(bytes));
  }
  return chooser_.is_message_exposed(plan.candidate, slowest);
}

void Evaluator::refine(std::vector<Evaluation>& plans, const StageHolders& holders) const {
  const Candidate candidate = plans.front().candidate;
  const bool is_matrix = std::holds_alternative<LinkMatrix>(problem_.cluster.topology);
  if (is_matrix) {
    for (Evaluation& plan : plans) search_devices(plan);
  }
  keep_best(plans, kMostStarts);
  std::vector<Evaluation> others;
  for (const auto& firsts : chooser_.splits_for(candidate, holders, plans[0].costs.edges)) {
    if (auto stages = chooser_.stages_of(candidate, holders, firsts)) {
      others.push_back(placed(candidate, *std::move(stages), plans[0].devices));
    }
  }
  keep_best(others, kMostStarts);
  if (is_matrix && !others.empty() &&
      first_layers(others[0].stages) != first_layers(plans[0].stages)) {
    search_devices(others[0]);
  }
  std::ranges::move(others, std::back_inserter(plans));
  for (Evaluation& plan : plans) move_cuts(plan, holders, kMostTries, by_closed_form);
  keep_best(plans, kMostStarts);
  if (candidate.shape.rule->has_exact_closed_form()) return;
  const double actions = simulated_actions(candidate.shape);
  const int num_tries = static_cast<int>(2 * kMostSimulatedActions / actions);
  for (Evaluation& plan : plans) {
    move_cuts(plan, holders, num_tries / static_cast<int>(plans.size()), by_simulation);
  }
}

// Takes every move that saves time, until none does or so many were tried.
void Evaluator::move_cuts(Evaluation& plan, const StageHolders& holders, int num_tries,
                          const std::function<double(const Evaluation&)>& seconds) const {
  const std::vector<int>& positions = chooser_.positions();
  const auto index_of = [&](int layer) {
    return static_cast<int>(std::ranges::lower_bound(positions, layer) - positions.begin());
  };
  std::vector<int> firsts = first_layers(plan.stages);
  double least = num_tries > 0 ? seconds(plan) : 0;
  for (bool has_moved = true; has_moved;) {
    has_moved = false;
    for (std::size_t k = 1; k < firsts.size(); ++k) {
      for (int by = -kReach; by <= kReach; ++by) {
        const int place = index_of(firsts[k]) + by;
        const int after = k + 1 < firsts.size() ? firsts[k + 1] : positions.back();
        if (by == 0 || place <= index_of(firsts[k - 1]) || place >= index_of(after)) continue;
        if (--num_tries < 0) return;
        std::vector<int> tried = firsts;
        tried[k] = positions[place];
        auto stages = chooser_.stages_of(plan.candidate, holders, tried);
        if (!stages) continue;
        Evaluation other = placed(plan.candidate, *std::move(stages), plan.devices);
        const double now = seconds(other);
        if (now >= least * (1 - 1e-9)) continue;
        least = now;
        plan = std::move(other);
        firsts = std::move(tried);
        has_moved = true;
      }
    }
  }
}

}  // namespace pd2
