#include "core/partition/stage_split.h"

#include "core/check.h"
#include "core/partition/cheapest_split.h"
#include "core/partition/split_costs.h"
#include "core/partition/stage_memory.h"
#include "core/partition/stage_rows.h"

#include <algorithm>

namespace pd2 {
namespace {

// No split's slowest stage takes less: every piece is on some stage, and all share the whole.
Cost lower_bound(const SplitCosts& costs) {
  const int n = costs.num_pieces();
  Cost bound = 0;
  const double fastest = *std::min_element(costs.slownesses().begin(), costs.slownesses().end());
  for (int i = 0; i < n; ++i) bound = std::max(bound, costs.compute(fastest, i, i + 1));
  double speed = 0;
  for (int k = 0; k < costs.num_stages(); ++k) speed += 1 / costs.rule(k).slowness;
  const double share = static_cast<double>(costs.compute(0, n)) / speed;
  return std::max(bound, static_cast<Cost>(share * (1 - 1e-9)));
}

// Makes each stage as long as `limit` and memory allow; the slowest stage of what comes out.
std::optional<Cost> slowest_of_greedy(const SplitCosts& costs, const MemoryFit& memory,
                                      Cost limit) {
  Cost slowest = 0;
  for (int k = 0, a = 0; k < costs.num_stages(); ++k) {
    const double slowness = costs.rule(k).slowness;
    int end = a;
    Cost cost_of_end = 0;
    Messages messages;
    for (int b = a + 1; b <= memory.farthest[k][a]; ++b) {
      costs.extend(messages, a, b - 1);
      const Cost compute = costs.compute(slowness, a, b);
      if (compute > limit) break;
      if (!memory.may_begin[k + 1][b] || compute + messages.cost() > limit) continue;
      end = b;
      cost_of_end = compute + messages.cost();
    }
    if (end == a) return std::nullopt;
    slowest = std::max(slowest, cost_of_end);
    a = end;
  }
  return slowest;
}

// An upper bound, close to the lowest that greedy splits achieve.
Cost upper_bound(const SplitCosts& costs, const MemoryFit& memory, Cost low) {
  Cost high = slowest_of_greedy(costs, memory, kInfiniteCost).value();
  while (high - low > high / 1024) {
    const Cost middle = low + (high - low) / 2;
    if (const std::optional<Cost> slowest = slowest_of_greedy(costs, memory, middle)) {
      high = *slowest;
    } else {
      low = middle + 1;
    }
  }
  return high;
}

Cost slowest_of_any(const SplitCosts& costs, const StageRows& rows,
                    const std::vector<Positions>& from) {
  Cost slowest = 0;
  for (int k = 0, a = 0; k < costs.num_stages(); ++k) {
    int end = a + 1;
    while (!has(from[k + 1], end) || !rows.allows(k, a, end)) ++end;
    slowest = std::max(slowest, costs.cost(k, a, end));
    a = end;
  }
  return slowest;
}

// Bisects the costs of the pending stages; leaves the bits of all stages that cost at most the
// result.
Cost smallest_slowest(const SplitCosts& costs, StageRows& rows, Cost high) {
  std::vector<StageRows::Pending>& pending = rows.pending;
  const auto costs_less = [](const auto& a, const auto& b) { return a.cost < b.cost; };
  while (true) {
    std::erase_if(pending, [&](const auto& stage) { return stage.cost > high; });
    const auto below = std::partition(pending.begin(), pending.end(),
                                      [&](const auto& stage) { return stage.cost < high; });
    if (below == pending.begin()) break;
    const auto median = pending.begin() + (below - pending.begin()) / 2;
    std::nth_element(pending.begin(), median, below, costs_less);
    const Cost limit = median->cost;
    const auto tried = std::partition(pending.begin(), below,
                                      [&](const auto& stage) { return stage.cost <= limit; });
    std::for_each(pending.begin(), tried, [&](const auto& stage) { rows.set(stage, true); });
    const std::vector<Positions> from = coverable(costs, rows, limit);
    if (has(from[0], 0)) {
      high = slowest_of_any(costs, rows, from);
      std::for_each(pending.begin(), tried, [&](const auto& stage) { rows.set(stage, false); });
    } else {
      pending.erase(pending.begin(), tried);
    }
  }
  for (const StageRows::Pending& stage : pending) rows.set(stage, true);
  return high;
}

}  // namespace

std::optional<StageSplit> split_stages(const StageSplitProblem& problem) {
  const SplitCosts costs(problem);
  std::vector<double> limits;
  for (const StageMemoryRule& rule : problem.stages) limits.push_back(rule.limit);
  const MemoryFit memory = fit_memory(costs, limits);
  if (!memory.fits()) return std::nullopt;

  const Cost low = lower_bound(costs);
  const Cost high = upper_bound(costs, memory, low);
  StageRows rows(costs, memory, low, high);
  const Cost slowest = smallest_slowest(costs, rows, high);
  const std::vector<Positions> from = coverable(costs, rows, slowest);
  PD2_ASSERT(has(from[0], 0));

  StageSplit split;
  for (const int piece : cheapest_split(costs, rows, from)) {
    split.first_layers.push_back(costs.first_layer(piece));
  }
  for (const StageUse& use : stage_uses(problem, split.first_layers)) {
    split.slowest = std::max(split.slowest, use.seconds());
  }
  return split;
}

}  // namespace pd2
