// The planner's search without its bounds.
#pragma once

#include "planner/plan/plan.h"

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

namespace pd2::testing {

// What best_plans() promises, from the evaluations of all candidates; with kMemory the fastest
// plans, and none where none fits.
inline std::vector<Evaluation> best_plans_exhaustively(const PlanProblem& problem) {
  const DeviceMappings mappings(problem.cluster);
  Evaluator evaluator(problem, mappings);
  std::vector<Evaluation> all;
  for (const Candidate& candidate : candidates(problem, mappings)) {
    if (auto evaluation = evaluator.evaluate(candidate)) all.push_back(*std::move(evaluation));
  }
  std::ranges::stable_sort(all, {}, &Evaluation::score);
  std::vector<Evaluation> best;
  for (Evaluation& plan : all) {
    const bool is_new = std::ranges::none_of(best, [&](const Evaluation& better) {
      return same_but_mapping(better.candidate, plan.candidate);
    });
    if (is_new) best.push_back(std::move(plan));
  }
  const double least = best.empty() ? 0 : best.front().score;
  std::ranges::stable_sort(best, {}, [least](const Evaluation& plan) {
    return plan.score < kEquallyGood * least
               ? std::tuple(0, plan.candidate.shape.mean_delay(), plan.peak_bytes)
               : std::tuple(1, 0.0, 0.0);
  });
  const std::size_t most = 1 + problem.options.num_alternatives;
  if (best.size() > most) best.erase(best.begin() + static_cast<std::ptrdiff_t>(most), best.end());
  return best;
}

}  // namespace pd2::testing
