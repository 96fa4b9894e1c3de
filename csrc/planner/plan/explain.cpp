// Why plans take as long as they do: explain() of planner/plan/plan.h.

#include "core/check.h"
#include "core/infinity.h"
#include "planner/plan/plan.h"

#include <algorithm>
#include <cstdio>

namespace pd2 {
namespace {

// Three significant digits, or whole ones.
std::string in_words(double value) {
  char text[32];
  std::snprintf(text, sizeof text, value < 999.5 ? "%.3g" : "%.0f", value);
  return text;
}

std::string in_seconds(double seconds) {
  if (seconds >= 1) return in_words(seconds) + " s";
  if (seconds >= 1e-3) return in_words(seconds * 1e3) + " ms";
  return in_words(seconds * 1e6) + " us";
}

// What a batch's time is made of: what it would lose if messages, then all-reduces and updates,
// were free, the busiest rank's work, and the rest.
struct Parts {
  double messages = 0;
  double all_reduce = 0;
  double update = 0;
  double work = 0;
  double bubble = 0;
};

Parts parts_of(const Evaluation& plan) {
  Parts parts;
  Costs costs = plan.costs;
  double before = plan.time.seconds;
  const auto without = [&](double& part) {
    const double now = std::min(before, step_time(plan.candidate.shape, costs).seconds);
    part = before - now;
    before = now;
  };
  for (EdgeCosts& edge : costs.edges) edge = {};
  costs.skips.clear();
  without(parts.messages);
  for (StageCosts& stage : costs.stages) stage.all_reduce = 0;
  without(parts.all_reduce);
  for (StageCosts& stage : costs.stages) stage.update = 0;
  without(parts.update);
  parts.work = std::min(before, busiest_rank(plan.candidate.shape, costs));
  parts.bubble = before - parts.work;
  return parts;
}

// The stage of which this is the most.
template <typename Amount>
int stage_of_most(const Evaluation& plan, Amount amount) {
  const auto most = std::ranges::max_element(plan.stages, {}, amount);
  return static_cast<int>(most - plan.stages.begin());
}

// Beside the work, which is always the most: what else takes a tenth of the time or more.
std::string largest_part(const Evaluation& plan) {
  const Parts parts = parts_of(plan);
  const double seconds = plan.time.seconds;
  const auto share = [&](double part) { return in_words(100 * part / seconds) + " % of "; };
  const std::string of_batch = in_seconds(seconds) + " a batch";
  const double largest =
      std::max({parts.messages, parts.all_reduce, parts.update, parts.bubble, 0.1 * seconds});
  if (largest == parts.messages) {
    const int stage = stage_of_most(plan, &PlannedStage::message);
    const PlannedStage& sender = plan.stages[stage];
    return detail::concat("the link from stage ", stage, " to ", sender.receiver, " (devices ",
                          sender.devices.front(), " and ",
                          plan.stages[sender.receiver].devices.front(), "): messages of ",
                          in_seconds(sender.message), " are ", share(parts.messages), of_batch);
  }
  if (largest == parts.all_reduce) {
    const int stage =
        stage_of_most(plan, [](const PlannedStage& each) { return each.costs.all_reduce; });
    const int copies =
        plan.candidate.width * (plan.candidate.shape.method->is_bidirectional() ? 2 : 1);
    return detail::concat("the all-reduce of stage ", stage, " over ", copies,
                          " copies: ", share(parts.all_reduce), of_batch);
  }
  if (largest == parts.update) return "the optimizer's step: " + share(parts.update) + of_batch;
  if (largest == parts.bubble) {
    return detail::concat("bubbles of ", plan.candidate.shape.method->name, ": ",
                          share(parts.bubble), of_batch);
  }
  const int stage = stage_of_most(plan, [](const PlannedStage& each) { return each.costs.work(); });
  return detail::concat("compute of stage ", stage, " (layers ", plan.stages[stage].first, " to ",
                        plan.stages[stage].end - 1, "): ", share(parts.work), of_batch);
}

// Names the plan that would be faster if memory were unlimited.
std::string forbidden_by_memory(const PlanProblem& problem, const Evaluation& plan) {
  if (problem.options.objective != Objective::kThroughput) return "";
  PlanProblem unlimited = problem;
  for (DeviceType& type : unlimited.cluster.types) {
    type.memory_bytes = kInfinity;
  }
  const std::optional<Evaluation> faster = better_plan(unlimited, plan.score / kEquallyGood);
  if (!faster) return "";
  return detail::concat("; memory forbids ", to_string(faster->candidate), ", ",
                        in_seconds(faster->time.seconds), " a batch, which needs ",
                        in_words((faster->peak_bytes + problem.options.reserved) / kBytesPerGiB),
                        " GiB");
}

std::string why_it_lost(const Evaluation& best, const Evaluation& other, Objective objective) {
  const bool is_equal = other.score < kEquallyGood * best.score;
  const char* of_equal = objective == Objective::kCost     ? "equally expensive"
                         : objective == Objective::kMemory ? "as much memory"
                                                           : "equally fast";
  const char* unit = objective == Objective::kCost     ? " % more expensive"
                     : objective == Objective::kMemory ? " % more memory"
                                                       : " % slower";
  return (is_equal ? of_equal : in_words(100 * (other.score / best.score - 1)) + unit) +
         "; bound by " + largest_part(other);
}

}  // namespace

Explanation explain(const PlanProblem& problem, const std::vector<Evaluation>& plans) {
  const Evaluation& best = plans.front();
  Explanation why;
  why.bound_by = largest_part(best) + forbidden_by_memory(problem, best);
  for (std::size_t i = 1; i < plans.size(); ++i) {
    why.lost_by.push_back(why_it_lost(best, plans[i], problem.options.objective));
  }
  return why;
}

}  // namespace pd2
