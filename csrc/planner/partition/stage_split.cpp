#include "planner/partition/stage_split.h"

#include "core/check.h"
#include "planner/partition/stage_rows.h"

#include <algorithm>
#include <bit>

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

// The positions of `from` that stages from piece 0 on reach.
std::vector<Positions> on_some_split(const SplitCosts& costs, const StageRows& rows,
                                     const std::vector<Positions>& from) {
  std::vector<Positions> on = {from[0]};
  for (int k = 0; k < costs.num_stages(); ++k) {
    Positions next(from[k].size(), 0);
    for (int a = k; a < costs.num_pieces(); ++a) {
      if (has(on[k], a)) rows.add_ends(k, a, next);
    }
    for (std::size_t word = 0; word < next.size(); ++word) next[word] &= from[k + 1][word];
    on.push_back(std::move(next));
  }
  return on;
}

// [k][a]: the least sum of messages of stages k .. d - 1 over the pieces from a on. Looks only into
// those words of ends that may have something better.
std::vector<std::vector<Cost>> least_messages(const SplitCosts& costs, const StageRows& rows,
                                              const std::vector<Positions>& on) {
  const int n = costs.num_pieces();
  const int d = costs.num_stages();
  const std::size_t num_words = n / 64 + 1;
  std::vector<std::vector<Cost>> least(d + 1, std::vector<Cost>(n + 1, kInfiniteCost));
  std::vector<std::vector<Cost>> least_of_word(d + 1, std::vector<Cost>(num_words, kInfiniteCost));
  least[d][n] = least_of_word[d][n / 64] = 0;
  // The messages of the stages that begin at a, by end, and the least of each word.
  std::vector<Cost> from_here(n + 1);
  std::vector<Cost> from_here_of_word(num_words);
  for (int a = n - 1; a >= 0; --a) {
    std::ranges::fill(from_here_of_word, kInfiniteCost);
    Messages messages;
    for (int end = a + 1; end <= rows.last_end(a); ++end) {
      costs.extend(messages, a, end - 1);
      from_here[end] = messages.cost();
      Cost& of_word = from_here_of_word[end / 64];
      of_word = std::min(of_word, from_here[end]);
    }
    for (int k = 0; k < d; ++k) {
      if (!has(on[k], a)) continue;
      Cost best = kInfiniteCost;
      for (int word = rows.first_word(a); word <= rows.last_word(k, a); ++word) {
        if (from_here_of_word[word] + least_of_word[k + 1][word] >= best) continue;
        for (std::uint64_t left = rows.ends(k, a, word); left != 0; left &= left - 1) {
          const int end = 64 * word + std::countr_zero(left);
          best = std::min(best, from_here[end] + least[k + 1][end]);
        }
      }
      least[k][a] = best;
      least_of_word[k][a / 64] = std::min(least_of_word[k][a / 64], best);
    }
  }
  return least;
}

// The first piece of each stage of the split with the smallest sum of message costs, of several the
// one with the earliest cuts, among those whose stages are all allowed. There has to be one. `from`
// is coverable()'s.
std::vector<int> cheapest_split(const SplitCosts& costs, const StageRows& rows,
                                const std::vector<Positions>& from) {
  const auto rest = least_messages(costs, rows, on_some_split(costs, rows, from));
  PD2_ASSERT(rest[0][0] < kInfiniteCost);
  std::vector<int> firsts = {0};
  for (int k = 0; k + 1 < costs.num_stages(); ++k) {
    const int a = firsts.back();
    Messages messages;
    int b = a;
    do {
      PD2_ASSERT(b < costs.num_pieces());
      costs.extend(messages, a, b++);
    } while (rest[k + 1][b] + messages.cost() != rest[k][a] || !rows.allows(k, a, b));
    firsts.push_back(b);
  }
  return firsts;
}

}  // namespace

std::optional<std::vector<int>> first_pieces(const SplitCosts& costs,
                                             const std::vector<double>& limits) {
  const MemoryFit memory = fit_memory(costs, limits);
  if (!memory.fits()) return std::nullopt;
  const Cost low = lower_bound(costs);
  const Cost high = upper_bound(costs, memory, low);
  StageRows rows(costs, memory, low, high);
  const Cost slowest = smallest_slowest(costs, rows, high);
  return cheapest_split(costs, rows, coverable(costs, rows, slowest));
}

std::optional<StageSplit> split_stages(const StageSplitProblem& problem) {
  const SplitCosts costs(problem);
  std::vector<double> limits;
  for (const StageMemoryRule& rule : problem.stages) limits.push_back(rule.limit);
  const std::optional<std::vector<int>> firsts = first_pieces(costs, limits);
  if (!firsts) return std::nullopt;
  StageSplit split;
  Cost slowest = 0;
  for (int k = 0; k < costs.num_stages(); ++k) {
    const bool is_last = k + 1 == costs.num_stages();
    const int end = is_last ? costs.num_pieces() : (*firsts)[k + 1];
    slowest = std::max(slowest, costs.cost(k, (*firsts)[k], end));
    split.first_layers.push_back(costs.first_layer((*firsts)[k]));
  }
  split.slowest = costs.seconds(slowest);
  return split;
}

}  // namespace pd2
