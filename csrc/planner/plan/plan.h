// The planner: of all candidates the best, the next best, and why nothing is better.

#pragma once

#include "core/check.h"
#include "planner/plan/evaluate.h"

#include <optional>
#include <string>
#include <vector>

namespace pd2 {

// The model fits the memory on no plan. Python sees it as pipedream2bw.errors.DoesNotFit.
class DoesNotFit : public ValueError {
 public:
  DoesNotFit(const std::string& text, double limit) : ValueError(text), limit_(limit) {}

  // The memory of every device, in bytes, with which a plan is found.
  double limit() const { return limit_; }

 private:
  double limit_;
};

// Plans are equally good if their scores differ by less than this factor.
inline constexpr double kEquallyGood = 1.001;

// The best plans, the best first: 1 + options.num_alternatives of them at most, of each
// (schedule, w, d, v, b, recompute) the best mapping. Those come first that are as good as the one
// with the least score, by their mean_delay(), then by their peaks; the others by score.
//
// Best first by Bounds: candidates are evaluated by rising bound until the next bound is not below
// the worst score kept. So the result is that of evaluating all candidates. With kMemory the plans
// are those with the smallest peak of all that take at most 1 + slack of the least time; the
// smallest one's is at most a thousandth above the least memory with which such a plan is found.
//
// Throws ValueError if no candidate's sizes fit the batch, and DoesNotFit if none fits the memory:
// its text names the candidate that comes nearest, and what it lacks.
std::vector<Evaluation> best_plans(const PlanProblem& problem);

// The best plan, if its score is below `worth`; with kMemory the fastest one.
std::optional<Evaluation> better_plan(const PlanProblem& problem, double worth);

// Why plans take as long as they do, in words.
struct Explanation {
  std::string bound_by;              // of the best plan, one sentence
  std::vector<std::string> lost_by;  // of each other one
};

Explanation explain(const PlanProblem& problem, const std::vector<Evaluation>& plans);

}  // namespace pd2
