#include "core/stage_ties.h"

#include "core/check.h"

#include <algorithm>

namespace pd2 {
namespace {

// Minima over ranges of positions, and the search for the best position by a bound on it.
class MinimumTree {
 public:
  explicit MinimumTree(int num_positions) {
    while (leaves_ < num_positions) leaves_ *= 2;
    minimum_.assign(2 * leaves_, kInfiniteCost);
  }

  void assign(const std::vector<Cost>& keys) {
    std::copy(keys.begin(), keys.end(), minimum_.begin() + leaves_);
    for (int i = leaves_ - 1; i > 0; --i) {
      minimum_[i] = std::min(minimum_[2 * i], minimum_[2 * i + 1]);
    }
  }

  // Lowers `best` to the least cost_of(position) of the positions begin .. end - 1, given that
  // cost_of(position) >= floor + the position's key.
  template <typename CostOf>
  void search(int begin, int end, Cost floor, CostOf&& cost_of, Cost& best) const {
    search(1, 0, leaves_, begin, end, floor, cost_of, best);
  }

 private:
  template <typename CostOf>
  void search(int node, int low, int high, int begin, int end, Cost floor, CostOf& cost_of,
              Cost& best) const {
    if (high <= begin || end <= low || floor + minimum_[node] >= best) return;
    if (high - low == 1) {
      best = std::min(best, cost_of(low));
      return;
    }
    const int middle = (low + high) / 2;
    const bool right_first = minimum_[2 * node + 1] < minimum_[2 * node];
    if (right_first) search(2 * node + 1, middle, high, begin, end, floor, cost_of, best);
    search(2 * node, low, middle, begin, end, floor, cost_of, best);
    if (!right_first) search(2 * node + 1, middle, high, begin, end, floor, cost_of, best);
  }

  int leaves_ = 1;
  std::vector<Cost> minimum_;
};

// Those of `from` that stages from piece 0 on reach.
std::vector<Positions> on_some_split(const StageCosts& costs, const StageRows& rows,
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

// rest[k][a]: the least sum of messages of stages k .. d - 1 over the pieces from a on.
std::vector<std::vector<Cost>> least_rest(const StageCosts& costs, const StageRows& rows,
                                          const std::vector<Positions>& on) {
  const int n = costs.num_pieces();
  const int d = costs.num_stages();
  std::vector<std::vector<Cost>> rest(d + 1, std::vector<Cost>(n + 1, kInfiniteCost));
  rest[d][n] = 0;
  MinimumTree tree(n + 1);
  std::vector<Cost> keys(n + 1);
  for (int k = d - 1; k >= 0; --k) {
    const std::vector<Cost>& after = rest[k + 1];
    for (int b = 0; b <= n; ++b) keys[b] = after[b] + rows.least_leaving(b);
    tree.assign(keys);
    for (int a = k; a < n; ++a) {
      if (!has(on[k], a)) continue;
      Cost best = kInfiniteCost;
      const int last = rows.farthest(k, a);
      // Near ends one by one: their bounds are not tight, as values pass over short stages.
      Messages messages;
      for (int b = a + 1; b <= std::min(last, a + StageRows::kNear); ++b) {
        costs.extend(messages, a, b - 1);
        if (after[b] + messages.cost() < best && rows.allows(k, a, b)) {
          best = after[b] + messages.cost();
        }
      }
      const auto cost_of = [&](int b) {
        return rows.allows(k, a, b) ? after[b] + rows.message_cost(a, b) : kInfiniteCost;
      };
      tree.search(a + StageRows::kNear + 1, last + 1, rows.least_entering(a), cost_of, best);
      rest[k][a] = best;
    }
  }
  return rest;
}

}  // namespace

std::vector<int> cheapest_split(const StageCosts& costs, const StageRows& rows,
                                const std::vector<Positions>& from) {
  const std::vector<Positions> on = on_some_split(costs, rows, from);
  const std::vector<std::vector<Cost>> rest = least_rest(costs, rows, on);
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

}  // namespace pd2
