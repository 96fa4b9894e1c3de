// The planner's search without its bounds.
#pragma once

#include "planner/plan/evaluate.h"

#include <algorithm>
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
    if (best.size() > std::size_t(problem.options.num_alternatives)) break;
    const bool is_new = std::ranges::none_of(best, [&](const Evaluation& better) {
      return same_but_mapping(better.candidate, plan.candidate);
    });
    if (is_new) best.push_back(std::move(plan));
  }
  return best;
}

}  // namespace pd2::testing
