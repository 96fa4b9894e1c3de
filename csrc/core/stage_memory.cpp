#include "core/stage_memory.h"

#include <algorithm>

namespace pd2 {
namespace {

// The largest number of low .. high that holds, where low is known to hold and those that hold come
// first.
template <typename Holds>
int last_that(int low, int high, Holds&& holds) {
  while (low < high) {
    const int middle = high - (high - low) / 2;
    if (holds(middle)) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// What the stages from one first piece on receive, by end, found as far as asked for.
class ReceivedByEnd {
 public:
  ReceivedByEnd(const StageCosts& costs, int first) : costs_(costs), first_(first), received_(1) {}

  const Received& by(int end) {
    while (first_ + static_cast<int>(received_.size()) <= end) {
      costs_.extend(messages_, first_, first_ + static_cast<int>(received_.size()) - 1);
      received_.push_back(messages_.received);
    }
    return received_[end - first_];
  }

 private:
  const StageCosts& costs_;
  int first_;
  Messages messages_;
  std::vector<Received> received_;
};

void find_farthest(const StageCosts& costs, const std::vector<double>& limits, MemoryFit& fit) {
  const int n = costs.num_pieces();
  for (int a = 0; a < n; ++a) {
    ReceivedByEnd received(costs, a);
    for (int k = 0; k < costs.num_stages(); ++k) {
      const StageMemoryRule& rule = costs.rule(k);
      int& farthest = fit.farthest[k][a];
      if (costs.bytes(rule, a, n, costs.crossing(a)) <= limits[k]) {
        farthest = n;
        continue;
      }
      // First without what is received: it takes time to find.
      farthest = last_that(
          a, n, [&](int end) { return end == a || costs.bytes(rule, a, end, {}) <= limits[k]; });
      if (costs.counts_received(rule)) {
        farthest = last_that(a, farthest, [&](int end) {
          return costs.bytes(rule, a, end, received.by(end)) <= limits[k];
        });
      }
      if (farthest < n) {
        const Received more = costs.counts_received(rule) ? received.by(farthest + 1) : Received{};
        fit.next_bytes = std::min(fit.next_bytes, costs.bytes(rule, a, farthest + 1, more));
      }
    }
  }
}

}  // namespace

MemoryFit fit_memory(const StageCosts& costs, const std::vector<double>& limits) {
  const int n = costs.num_pieces();
  const int d = costs.num_stages();
  MemoryFit fit;
  fit.farthest.assign(d, std::vector<int>(n));
  fit.may_begin.assign(d + 1, std::vector<char>(n + 1, false));
  fit.next_bytes = std::numeric_limits<double>::infinity();
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
  const StageCosts costs(problem);
  const int d = costs.num_stages();
  const auto fit_with = [&](double limit) {
    return fit_memory(costs, std::vector<double>(d, limit));
  };
  // Of some split that fits: what its largest stage really takes.
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
  double high = taken(fit_with(std::numeric_limits<double>::infinity()));
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
