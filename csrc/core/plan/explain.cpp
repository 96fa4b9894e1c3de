#include "core/check.h"
#include "core/plan/plan.h"
#include "core/plan/unequal.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <future>
#include <limits>
#include <string_view>
#include <utility>

namespace pd2 {
namespace {

constexpr double kBytesPerGiB = 1024.0 * 1024 * 1024;
constexpr double kBytesPerGB = 1e9;

// Three significant digits.
std::string in_words(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g", value);
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

double seconds_with(const Evaluation& plan, const Costs& costs) {
  return step_time(plan.candidate.shape, costs).seconds;
}

Parts parts_of(const Evaluation& plan) {
  Parts parts;
  Costs costs = plan.costs;
  double before = plan.time.seconds;
  const auto without = [&](double& part) {
    const double now = std::min(before, seconds_with(plan, costs));
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

int busiest(const Evaluation& plan) {
  const std::vector<StageCosts>& stages = plan.costs.stages;
  const auto slowest = std::ranges::max_element(stages, {}, [](const StageCosts& stage) {
    return stage.forward + stage.input_grad + stage.weight_grad + stage.recompute;
  });
  return static_cast<int>(slowest - stages.begin());
}

int slowest_message(const Evaluation& plan) {
  const auto slowest = std::ranges::max_element(plan.stages, {}, &PlannedStage::message);
  return static_cast<int>(slowest - plan.stages.begin());
}

int longest_all_reduce(const Evaluation& plan) {
  const auto longest = std::ranges::max_element(
      plan.costs.stages, {}, [](const StageCosts& stage) { return stage.all_reduce; });
  return static_cast<int>(longest - plan.costs.stages.begin());
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
    const int stage = slowest_message(plan);
    const Evaluation& p = plan;
    const int receiver = p.stages[stage].receiver;
    return detail::concat("the link from stage ", stage, " to ", receiver, " (devices ",
                          p.stages[stage].devices.front(), " and ",
                          p.stages[receiver].devices.front(), "): messages of ",
                          in_seconds(p.stages[stage].message), " are ", share(parts.messages),
                          of_batch);
  }
  if (largest == parts.all_reduce) {
    const int stage = longest_all_reduce(plan);
    const int copies = plan.candidate.width * (plan.candidate.shape.rule->is_bidirectional ? 2 : 1);
    return detail::concat("the all-reduce of stage ", stage, " over ", copies,
                          " copies: ", share(parts.all_reduce), of_batch);
  }
  if (largest == parts.update) return "the optimizer's step: " + share(parts.update) + of_batch;
  if (largest == parts.bubble) {
    return detail::concat("bubbles of ", plan.candidate.shape.rule->name, ": ", share(parts.bubble),
                          of_batch);
  }
  const int stage = busiest(plan);
  return detail::concat("compute of stage ", stage, " (layers ", plan.stages[stage].first, " to ",
                        plan.stages[stage].end - 1, "): ", share(parts.work), of_batch);
}

bool has_limit(const PlanProblem& problem) {
  return std::ranges::any_of(problem.cluster.types, [](const DeviceType& type) {
    return std::isfinite(type.memory_bytes);
  });
}

// What would be faster if memory were unlimited.
std::string forbidden_by_memory(const PlanProblem& problem, const Evaluation& plan) {
  if (problem.options.objective != Objective::kThroughput || !has_limit(problem)) return "";
  PlanProblem unlimited = problem;
  for (DeviceType& type : unlimited.cluster.types) {
    type.memory_bytes = std::numeric_limits<double>::infinity();
  }
  const std::optional<Evaluation> faster = better_plan(unlimited, plan.score * (1 - 1e-6));
  if (!faster) return "";
  return detail::concat("; memory forbids ", to_string(faster->candidate), ", ",
                        in_seconds(faster->time.seconds), " a batch, which needs ",
                        in_words((faster->peak_bytes + problem.options.reserved) / kBytesPerGiB),
                        " GiB");
}

// What stages of unequal width would save, if more than a hundredth.
std::string saved_by_unequal_stages(const PlanProblem& problem, const Evaluation& plan) {
  if (problem.options.objective != Objective::kThroughput) return "";
  const int rows = plan.candidate.batch();
  const auto found = unequal_replication(problem, 0.99 * plan.time.seconds / rows);
  if (!found) return "";
  std::string widths;
  for (const int width : found->replicas) {
    widths += detail::concat(widths.empty() ? "" : ", ", width);
  }
  return detail::concat("; with unequal replication, which the pipeline does not run, stages of ",
                        widths, " devices would take ", in_seconds(found->seconds_per_row * rows),
                        " a batch");
}

// Each of the links with one GB/s more.
std::vector<std::pair<std::string, Topology>> faster_links(const Topology& topology) {
  std::vector<std::pair<std::string, Topology>> all;
  const auto add = [&](std::string_view name, auto changed, auto link) {
    if (std::isinf((changed.*link).bandwidth)) return;
    (changed.*link).bandwidth += kBytesPerGB;
    all.emplace_back(detail::concat("GB/s ", name), changed);
  };
  if (const auto* servers = std::get_if<Servers>(&topology)) {
    add("inside", *servers, &Servers::inside);
    add("outside", *servers, &Servers::outside);
  } else if (const auto* mesh = std::get_if<Mesh>(&topology)) {
    add("row", *mesh, &Mesh::row);
    add("column", *mesh, &Mesh::column);
  } else {
    LinkMatrix matrix = std::get<LinkMatrix>(topology);
    for (Link& link : matrix.links) link.bandwidth += kBytesPerGB;
    all.emplace_back("GB/s of every link", std::move(matrix));
  }
  return all;
}

// What is saved, and of what if it is not time.
std::string in_unit(const std::string& what, Objective objective) {
  return what + (objective == Objective::kCost ? " (price)" : "");
}

Gain gain(std::string what, const PlanProblem& changed, const Evaluation& plan) {
  const std::optional<Evaluation> better = better_plan(changed, plan.score);
  const double saved = better ? (plan.score - better->score) * plan.candidate.batch() : 0;
  return {std::move(what), saved};
}

std::string why_it_lost(const Evaluation& best, const Evaluation& other, Objective objective) {
  const double more = 100 * (other.score / best.score - 1);
  const char* unit = objective == Objective::kCost     ? " % dearer"
                     : objective == Objective::kMemory ? " % more memory"
                                                       : " % slower";
  return in_words(more) + unit + "; bound by " + largest_part(other);
}

}  // namespace

Explanation explain(const PlanProblem& problem, const std::vector<Evaluation>& plans) {
  const Evaluation& best = plans.front();
  Explanation why;
  // Each plans anew, which may take as long as the first time: all of them at once.
  const auto begin = [](auto&& what) { return std::async(std::launch::async, what); };
  std::future<std::string> forbidden = begin([&] { return forbidden_by_memory(problem, best); });
  std::vector<std::future<Gain>> gains;
  const auto add_gain = [&](const std::string& what, const PlanProblem& changed) {
    const std::string named = in_unit(what, problem.options.objective);
    gains.push_back(begin([named, changed, &best] { return gain(named, changed, best); }));
  };
  const bool has_gains = problem.options.objective != Objective::kMemory;
  if (has_gains && has_limit(problem)) {
    PlanProblem changed = problem;
    for (DeviceType& type : changed.cluster.types) type.memory_bytes += kBytesPerGiB;
    add_gain("GiB of memory", changed);
  }
  if (has_gains && problem.cluster.num_devices() > 1) {
    for (auto& [what, topology] : faster_links(problem.cluster.topology)) {
      PlanProblem changed = problem;
      changed.cluster.topology = std::move(topology);
      add_gain(what, changed);
    }
  }
  why.bound_by = largest_part(best) + forbidden.get() + saved_by_unequal_stages(problem, best);
  for (std::size_t i = 1; i < plans.size(); ++i) {
    why.lost_by.push_back(why_it_lost(best, plans[i], problem.options.objective));
  }
  for (std::future<Gain>& gain : gains) why.gains.push_back(gain.get());
  return why;
}

}  // namespace pd2
