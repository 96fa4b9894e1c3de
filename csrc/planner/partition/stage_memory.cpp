#include "planner/partition/stage_memory.h"

#include "core/infinity.h"

#include <algorithm>
#include <numeric>
#include <ranges>

namespace pd2 {
namespace {

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
void find_farthest(const SplitCosts& costs, const std::vector<double>& limits, MemoryFit& fit) {
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
      if (costs.bytes(rule, a, n, costs.crossing(a)) <= limits[k]) {
        farthest = n;
      } else {
        // First without what is received: that takes time to find.
        const auto fits = [&](int end) {
          if (costs.bytes(rule, a, end, {}) > limits[k]) return false;
          return !counts_received || costs.bytes(rule, a, end, received[a].by(end)) <= limits[k];
        };
        farthest = *std::ranges::partition_point(std::views::iota(a + 1, n + 1), fits) - 1;
        const Received more = counts_received ? received[a].by(farthest + 1) : Received{};
        fit.next_bytes = std::min(fit.next_bytes, costs.bytes(rule, a, farthest + 1, more));
      }
      reached = std::max(reached, farthest);
    }
  }
}

}  // namespace

MemoryFit fit_memory(const SplitCosts& costs, const std::vector<double>& limits) {
  const int n = costs.num_pieces();
  const int d = costs.num_stages();
  MemoryFit fit;
  std::vector<int> nowhere(n);
  std::iota(nowhere.begin(), nowhere.end(), 0);
  fit.farthest.assign(d, nowhere);
  fit.may_begin.assign(d + 1, std::vector<char>(n + 1, false));
  fit.next_bytes = kInfinity;
  find_farthest(costs, limits, fit);
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

double smallest_memory_limit(const StageSplitProblem& problem) {
  const SplitCosts costs(problem);
  const int d = costs.num_stages();
  const auto fit_with = [&](double limit) {
    return fit_memory(costs, std::vector<double>(d, limit));
  };
  // The bytes of the largest stage of some split that fits.
  const auto taken = [&](const MemoryFit& fit) {
    double most = 0;
    for (int k = 0, a = 0; k < d; ++k) {
      int end = a + 1;
      while (!fit.may_begin[k + 1][end]) ++end;
      most = std::max(most, costs.bytes(costs.rule(k), a, end, costs.messages(a, end).received));
      a = end;
    }
    return most;
  };

  // Nothing fits below `low`, and `high` does.
  double low = 0;
  double high = taken(fit_with(kInfinity));
  while (low < high) {
    double middle = low + (high - low) / 2;
    if (middle >= high) middle = low;  // neighbours
    const MemoryFit fit = fit_with(middle);
    if (fit.fits()) {
      high = taken(fit);
    } else {
      low = fit.next_bytes;
    }
  }
  return high;
}

}  // namespace pd2
