// Why plans take as long as they do, in words.

#pragma once

#include "core/plan/evaluate.h"

#include <string>
#include <vector>

namespace pd2 {

struct Explanation {
  std::string bound_by;              // of the best plan, one sentence
  std::vector<std::string> lost_by;  // of each other one
};

Explanation explain(const PlanProblem& problem, const std::vector<Evaluation>& plans);

}  // namespace pd2
