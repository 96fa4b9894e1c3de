#include "planner/partition/stage_split.h"

#include "core/check.h"
#include "core/infinity.h"
#include "planner/partition/split_costs.h"

#include <algorithm>
#include <numeric>
#include <ranges>

namespace pd2 {
namespace {

// ---------------------------------------------------------------- memory

// Memory alone. Of a given first piece a stage's bytes never shrink with its end, since values that
// have entered stay; of a given end they may grow with the first piece, since fewer values enter a
// longer stage.
struct MemoryFit {
  // [k][a]: the farthest end of stage k that begins at piece a; a itself if none fits.
  std::vector<std::vector<int>> farthest;
  // [k][a]: may stage k begin at a, so that it and the stages after it fit. k = num_stages: only
  // after the last piece.
  std::vector<std::vector<char>> may_begin;

  bool fits() const { return may_begin[0][0]; }
};

// The bytes that stages from one first piece on receive, by end, computed as far as asked for.
class ReceivedByEnd {
 public:
  ReceivedByEnd(const SplitCosts& costs, int first) : costs_(costs), first_(first), received_(1) {}

  const Received& by(int end) {
    while (first_ + static_cast<int>(received_.size()) <= end) {
      costs_.extend(messages_, first_, first_ + static_cast<int>(received_.size()) - 1);
      received_.push_back(messages_.received);
    }
    return received_[end - first_];
  }

 private:
  const SplitCosts& costs_;
  int first_;
  Messages messages_;
  std::vector<Received> received_;
};

// Finds the farthest end of the stages k that begin where stages 0 .. k - 1 can end.
void find_farthest(const SplitCosts& costs, MemoryFit& fit) {
  const int n = costs.num_pieces();
  const int d = costs.num_stages();
  std::vector<ReceivedByEnd> received;
  for (int a = 0; a < n; ++a) received.emplace_back(costs, a);
  int reached = 0;
  for (int k = 0; k < d; ++k) {
    const StageMemoryRule& rule = costs.rule(k);
    const bool counts_received = costs.counts_received(rule);
    const int last = std::min(reached, n - (d - k));
    for (int a = k; a <= last; ++a) {
      int& farthest = fit.farthest[k][a];
      if (costs.bytes(rule, a, n, costs.crossing(a)) <= rule.limit) {
        farthest = n;
      } else {
        // First without what is received: that takes time to find.
        const auto fits = [&](int end) {
          if (costs.bytes(rule, a, end, {}) > rule.limit) return false;
          return !counts_received || costs.bytes(rule, a, end, received[a].by(end)) <= rule.limit;
        };
        farthest = *std::ranges::partition_point(std::views::iota(a + 1, n + 1), fits) - 1;
      }
      reached = std::max(reached, farthest);
    }
  }
}

MemoryFit fit_memory(const SplitCosts& costs) {
  const int n = costs.num_pieces();
  const int d = costs.num_stages();
  MemoryFit fit;
  std::vector<int> nowhere(n);
  std::iota(nowhere.begin(), nowhere.end(), 0);
  fit.farthest.assign(d, nowhere);
  fit.may_begin.assign(d + 1, std::vector<char>(n + 1, false));
  find_farthest(costs, fit);
  fit.may_begin[d][n] = true;
  for (int k = d - 1; k >= 0; --k) {
    int next = n + 1;  // the nearest position at which stage k + 1 may begin
    for (int a = n - 1; a >= 0; --a) {
      if (fit.may_begin[k + 1][a + 1]) next = a + 1;
      fit.may_begin[k][a] = next <= fit.farthest[k][a];
    }
  }
  return fit;
}

// ---------------------------------------------------------------- the split

// No split's slowest stage takes less: every piece is on some stage, and all share the whole.
Cost lower_bound(const SplitCosts& costs) {
  const int n = costs.num_pieces();
  Cost bound = 0;
  const double fastest = std::ranges::min(costs.slownesses());
  for (int i = 0; i < n; ++i) bound = std::max(bound, costs.compute(fastest, i, i + 1));
  double speed = 0;
  for (int k = 0; k < costs.num_stages(); ++k) speed += 1 / costs.rule(k).slowness;
  const double share = static_cast<double>(costs.compute(0, n)) / speed;
  return std::max(bound, static_cast<Cost>(share * (1 - 1e-9)));
}

// [k]: the first and the last piece that stage k may begin at, if by their compute all stages are
// to take at most `limit`. The margin is for what rounding a product with the slowness took away.
std::vector<std::pair<int, int>> begins_by_compute(const SplitCosts& costs, Cost limit) {
  const int n = costs.num_pieces();
  const int d = costs.num_stages();
  const auto of_stage = [&](int k) {
    return (static_cast<double>(limit) + 1) / costs.rule(k).slowness * (1 + 1e-9);
  };
  std::vector<std::pair<int, int>> begins(d);
  double before = 0;  // that the stages before k may take
  for (int k = 0, last = 0; k < d; before += of_stage(k++)) {
    while (last < n && static_cast<double>(costs.compute(0, last + 1)) <= before) ++last;
    begins[k].second = std::min(last, n - (d - k));
  }
  double after = 0;  // that stage k and those after it may take
  for (int k = d - 1, first = n; k >= 0; --k) {
    after += of_stage(k);
    while (first > 0 && static_cast<double>(costs.compute(first - 1, n)) <= after) --first;
    begins[k].first = std::max(first, k);
  }
  return begins;
}

// [k][a]: the least that stages k .. d - 1 over the pieces from a on come to, all of them within
// memory and of at most `limit`; kInfiniteCost where there are none. `join` gives what a stage and
// those after it come to together, of its cost, its messages and theirs. What is at most `enough`
// counts as the least.
template <typename Join>
std::vector<std::vector<Cost>> least_of_rest(const SplitCosts& costs, const MemoryFit& memory,
                                             Cost limit, Cost enough, Join&& join) {
  const int n = costs.num_pieces();
  const int d = costs.num_stages();
  const double fastest = std::ranges::min(costs.slownesses());
  const std::vector<std::pair<int, int>> begins = begins_by_compute(costs, limit);
  std::vector<std::vector<Cost>> least(d + 1, std::vector<Cost>(n + 1, kInfiniteCost));
  least[d][n] = 0;
  // Of the stages that begin at a, by end.
  std::vector<Cost> messages(n + 1);
  std::vector<std::vector<Cost>> cost(costs.slownesses().size(), std::vector<Cost>(n + 1));
  for (int a = n - 1; a >= 0; --a) {
    Messages of_stage;
    int last = a;
    while (last < n && costs.compute(fastest, a, last + 1) <= limit) {
      costs.extend(of_stage, a, last++);
      messages[last] = of_stage.cost();
      for (std::size_t s = 0; s < cost.size(); ++s) {
        cost[s][last] = costs.compute(costs.slownesses()[s], a, last) + messages[last];
      }
    }
    for (int k = 0; k < d; ++k) {
      if (a < begins[k].first || a > begins[k].second) continue;
      const std::vector<Cost>& of_end = cost[costs.slowness_of(k)];
      Cost best = kInfiniteCost;
      for (int end = a + 1; end <= std::min(last, memory.farthest[k][a]) && best > enough; ++end) {
        if (of_end[end] > limit) continue;
        best = std::min(best, join(of_end[end], messages[end], least[k + 1][end]));
      }
      least[k][a] = best;
    }
  }
  return least;
}

// There has to be a split. Looks at stages up to a limit that rises until there is one.
Cost smallest_slowest(const SplitCosts& costs, const MemoryFit& memory) {
  const auto slowest = [](Cost cost, Cost, Cost rest) { return std::max(cost, rest); };
  const Cost low = lower_bound(costs);
  for (Cost limit = low, step = low / 16 + 1;; step *= 2) {
    limit += step;
    const Cost found = least_of_rest(costs, memory, limit, low, slowest)[0][0];
    if (found < kInfiniteCost) return found;
  }
}

// The first piece of each stage of the split with the smallest sum of message costs, of several the
// one with the earliest cuts, among those whose stages cost at most `limit`. There has to be one.
std::vector<int> cheapest_split(const SplitCosts& costs, const MemoryFit& memory, Cost limit) {
  const auto sum = [](Cost, Cost messages, Cost rest) { return messages + rest; };
  const auto rest = least_of_rest(costs, memory, limit, 0, sum);
  PD2_ASSERT(rest[0][0] < kInfiniteCost);
  std::vector<int> firsts = {0};
  for (int k = 0; k + 1 < costs.num_stages(); ++k) {
    const int a = firsts.back();
    Messages messages;
    int b = a;
    do {
      PD2_ASSERT(b < memory.farthest[k][a]);
      costs.extend(messages, a, b++);
    } while (rest[k + 1][b] + messages.cost() != rest[k][a] || costs.cost(k, a, b) > limit);
    firsts.push_back(b);
  }
  return firsts;
}

}  // namespace

std::optional<StageSplit> split_stages(const StageSplitProblem& problem) {
  const SplitCosts costs(problem);
  const MemoryFit memory = fit_memory(costs);
  if (!memory.fits()) return std::nullopt;
  const Cost slowest = smallest_slowest(costs, memory);
  StageSplit split = {.first_layers = {}, .slowest = costs.seconds(slowest)};
  for (const int piece : cheapest_split(costs, memory, slowest)) {
    split.first_layers.push_back(costs.first_layer(piece));
  }
  return split;
}

}  // namespace pd2
