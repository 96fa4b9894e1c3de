#include "core/partition.h"

#include "core/check.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>

namespace pd2 {
namespace {

// Costs as integers: sums are exact and equal sums compare equal, which the ties need.
using Cost = std::int64_t;
constexpr Cost kInfinite = std::numeric_limits<Cost>::max() / 4;

// Keeps the sum of everything below 2^60.
constexpr int kSumBits = 60;

void check_costs(std::span<const double> costs, const char* what) {
  for (std::size_t i = 0; i < costs.size(); ++i) {
    PD2_CHECK(std::isfinite(costs[i]) && costs[i] >= 0, what, "[", i, "]: ", costs[i],
              ": a cost must be finite and >= 0");
  }
}

// The power of two that scales the costs to integers.
int scale_exponent(std::span<const double> costs, std::span<const double> cut_costs) {
  double largest = 0;
  for (const double cost : costs) largest = std::max(largest, cost);
  for (const double cost : cut_costs) largest = std::max(largest, cost);
  if (largest == 0) return 0;
  // Summed relative to the largest one: the sum of finite costs need not be finite.
  const int exponent = std::ilogb(largest);
  double sum = 0;
  for (const double cost : costs) sum += std::ldexp(cost, -exponent);
  for (const double cost : cut_costs) sum += 2 * std::ldexp(cost, -exponent);
  return kSumBits - 1 - std::ilogb(sum) - exponent;
}

Cost scaled(double cost, int exponent) {
  return static_cast<Cost>(std::llround(std::ldexp(cost, exponent)));
}

// A stage of the layers a .. b-1 costs start(b) - end(a), where position i lies before layer i.
struct Problem {
  int num_layers = 0;
  std::vector<Cost> cut;      // by position; 0 before the first and after the last layer
  std::vector<Cost> enter;    // sum of the layers before the position, minus the cut there
  std::vector<Cost> leave;    // sum of the layers before the position, plus the cut there
  std::vector<char> allowed;  // may a stage begin or end here

  Cost stage_cost(int begin, int end) const { return leave[end] - enter[begin]; }
};

Problem make_problem(std::span<const double> costs, std::span<const double> cut_costs,
                     const std::vector<bool>& can_cut) {
  const int n = static_cast<int>(costs.size());
  const int exponent = scale_exponent(costs, cut_costs);
  Problem problem;
  problem.num_layers = n;
  problem.cut.assign(n + 1, 0);
  problem.allowed.assign(n + 1, true);
  for (int i = 1; i < n; ++i) {
    if (!cut_costs.empty()) problem.cut[i] = scaled(cut_costs[i - 1], exponent);
    if (!can_cut.empty()) problem.allowed[i] = can_cut[i - 1];
  }
  Cost sum = 0;
  for (int i = 0; i <= n; ++i) {
    problem.enter.push_back(sum - problem.cut[i]);
    problem.leave.push_back(sum + problem.cut[i]);
    if (i < n) sum += scaled(costs[i], exponent);
  }
  return problem;
}

// Can the layers be cut into num_stages stages of at most `limit` each?
bool fits(const Problem& problem, int num_stages, Cost limit) {
  const int n = problem.num_layers;
  // ends[b]: some legal cutting has its k-th stage end at position b.
  std::vector<char> ends(n + 1, false);
  ends[0] = true;
  for (int k = 1; k <= num_stages; ++k) {
    // A stage that ends at b may begin at any a < b with enter(a) >= leave(b) - limit: only the
    // largest enter(a) so far matters.
    Cost best_enter = -kInfinite;
    bool before = ends[0];
    ends[0] = false;
    for (int b = 1; b <= n; ++b) {
      if (before) best_enter = std::max(best_enter, problem.enter[b - 1]);
      before = ends[b];
      ends[b] = problem.allowed[b] && problem.leave[b] - best_enter <= limit;
    }
  }
  return ends[n];
}

Cost smallest_bottleneck(const Problem& problem, int num_stages) {
  const Cost total = problem.leave[problem.num_layers];
  const Cost largest_cut = *std::max_element(problem.cut.begin(), problem.cut.end());
  Cost low = 0;
  Cost high = total + 2 * largest_cut;
  PD2_ASSERT(fits(problem, num_stages, high));
  while (low < high) {
    const Cost middle = low + (high - low) / 2;
    if (fits(problem, num_stages, middle)) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return high;
}

// Minimum over a prefix of positions that are ordered by their `leave` cost (a Fenwick tree).
class PrefixMinimum {
 public:
  explicit PrefixMinimum(std::size_t size) : values_(size + 1, kInfinite) {}

  void insert(std::size_t rank, Cost value) {
    for (std::size_t i = rank + 1; i < values_.size(); i += i & -i) {
      values_[i] = std::min(values_[i], value);
    }
  }
  Cost minimum_of_first(std::size_t count) const {
    Cost value = kInfinite;
    for (std::size_t i = count; i > 0; i -= i & -i) value = std::min(value, values_[i]);
    return value;
  }

 private:
  std::vector<Cost> values_;
};

// table[k][a]: the smallest total cut cost of k stages of at most `limit` over the layers a .. n-1,
// not counting the cut at a; kInfinite where there are none.
std::vector<std::vector<Cost>> cheapest_cuts(const Problem& problem, int num_stages, Cost limit) {
  const int n = problem.num_layers;
  std::vector<Cost> sorted_leave = problem.leave;
  std::sort(sorted_leave.begin(), sorted_leave.end());
  const auto rank_below = [&](Cost value) {  // how many positions leave for less
    return std::lower_bound(sorted_leave.begin(), sorted_leave.end(), value) - sorted_leave.begin();
  };
  std::vector<std::size_t> rank(n + 1);
  std::vector<std::size_t> num_reachable(n + 1);  // positions b with stage_cost(a, b) <= limit
  for (int i = 0; i <= n; ++i) {
    rank[i] = rank_below(problem.leave[i]);
    num_reachable[i] = rank_below(problem.enter[i] + limit + 1);
  }

  std::vector<std::vector<Cost>> table(num_stages + 1, std::vector<Cost>(n + 1, kInfinite));
  table[0][n] = 0;
  for (int k = 1; k <= num_stages; ++k) {
    PrefixMinimum rest(n + 1);
    for (int a = n - 1; a >= 0; --a) {
      const int b = a + 1;
      if (table[k - 1][b] < kInfinite) rest.insert(rank[b], problem.cut[b] + table[k - 1][b]);
      if (problem.allowed[a]) table[k][a] = rest.minimum_of_first(num_reachable[a]);
    }
  }
  return table;
}

}  // namespace

std::vector<int> partition(std::span<const double> costs, std::span<const double> cut_costs,
                           int num_stages, const std::vector<bool>& can_cut) {
  const std::size_t n = costs.size();
  PD2_CHECK(num_stages >= 1, "num_stages: ", num_stages, ": a pipeline needs num_stages >= 1");
  PD2_CHECK(static_cast<std::size_t>(num_stages) <= n, "num_stages: ", num_stages, ", layers: ", n,
            ": every stage needs at least one layer");
  PD2_CHECK(n <= std::numeric_limits<int>::max() / 2, "layers: ", n, ": too many");
  PD2_CHECK(cut_costs.empty() || cut_costs.size() == n - 1, "cut_costs: ", cut_costs.size(),
            ", layers: ", n, ": needs layers - 1 entries, or none");
  PD2_CHECK(can_cut.empty() || can_cut.size() == n - 1, "can_cut: ", can_cut.size(),
            ", layers: ", n, ": needs layers - 1 entries, or none");
  check_costs(costs, "costs");
  check_costs(cut_costs, "cut_costs");
  if (!can_cut.empty()) {
    const auto num_allowed = std::count(can_cut.begin(), can_cut.end(), true);
    PD2_CHECK(num_allowed >= num_stages - 1, "num_stages: ", num_stages,
              ", allowed cuts: ", num_allowed, ": needs num_stages - 1 = ", num_stages - 1,
              " allowed cuts");
  }

  const Problem problem = make_problem(costs, cut_costs, can_cut);
  const Cost limit = smallest_bottleneck(problem, num_stages);
  const std::vector<std::vector<Cost>> table = cheapest_cuts(problem, num_stages, limit);
  PD2_ASSERT(table[num_stages][0] < kInfinite);

  std::vector<int> firsts = {0};
  for (int k = num_stages; k > 1; --k) {
    const int a = firsts.back();
    int b = a + 1;
    while (problem.stage_cost(a, b) > limit || table[k - 1][b] == kInfinite ||
           problem.cut[b] + table[k - 1][b] != table[k][a]) {
      ++b;
      PD2_ASSERT(b < problem.num_layers);
    }
    firsts.push_back(b);
  }
  return firsts;
}

}  // namespace pd2
