#include "planner/partition/folded_split.h"

#include "planner/partition/split_costs.h"

#include <algorithm>
#include <utility>

namespace pd2 {
namespace {

// Limits on a rank's work that differ by less than a share of 1 / kSteps are as good as equal.
constexpr int kSteps = 4096;

struct StageRange {
  int first = 0;
  int end = 0;
  Cost cost = 0;
  HeldBytes held;
};

// From where a rank takes a layer that either of its stages could hold.
enum class From { kShorter, kFront, kBack };

class Folding {
 public:
  Folding(const SplitCosts& costs, From from) : costs_(costs), from_(from) {}

  // A split of which every rank takes at most `limit`.
  std::optional<std::vector<int>> with_limit(Cost limit) const {
    const int d = costs_.num_stages();
    std::vector<int> firsts(d);
    int begin = 0;
    int end = costs_.num_pieces();
    for (int r = 0; r < d / 2; ++r) {
      const int last = d - 1 - r;
      const double memory = std::min(costs_.rule(r).limit, costs_.rule(last).limit);
      StageRange front = stage_of(r, begin, begin + 1);
      StageRange back = stage_of(last, end - 1, end);
      const auto fits = [&](const StageRange& a, const StageRange& b) {
        return a.cost + b.cost <= limit && (a.held + b.held).all() <= memory;
      };
      if (!fits(front, back)) return std::nullopt;
      // The stages between need a piece each.
      for (int left = end - begin - 2 - (d - 2 - 2 * r); left > 0; --left) {
        const StageRange longer_front = stage_of(r, begin, front.end + 1);
        const StageRange longer_back = stage_of(last, back.first - 1, end);
        const bool may_front = fits(longer_front, back);
        const bool may_back = fits(front, longer_back);
        if (!may_front && !may_back) break;
        if (may_front && (!may_back || prefers_front(longer_front, longer_back))) {
          front = longer_front;
        } else {
          back = longer_back;
        }
      }
      firsts[r] = costs_.first_layer(begin);
      firsts[last] = costs_.first_layer(back.first);
      begin = front.end;
      end = back.first;
    }
    if (begin != end) return std::nullopt;
    return firsts;
  }

 private:
  bool prefers_front(const StageRange& longer_front, const StageRange& longer_back) const {
    return from_ == From::kShorter ? longer_front.cost <= longer_back.cost : from_ == From::kFront;
  }

  StageRange stage_of(int stage, int first, int end) const {
    const StageMemoryRule& rule = costs_.rule(stage);
    const Received received =
        costs_.counts_received(rule) ? costs_.messages(first, end).received : Received{};
    return {first, end, costs_.compute(rule.slowness, first, end),
            costs_.held(rule, first, end, received)};
  }

  const SplitCosts& costs_;
  const From from_;
};

}  // namespace

std::optional<std::vector<int>> split_folded(const StageSplitProblem& problem) {
  const SplitCosts costs(problem);
  const int d = costs.num_stages();
  const double slowest = *std::ranges::max_element(costs.slownesses());
  // A limit of all the work is enough for any rank.
  Cost high = costs.compute(slowest, 0, costs.num_pieces());
  std::optional<std::vector<int>> best;
  From from = From::kShorter;
  for (const From other : {From::kShorter, From::kFront, From::kBack}) {
    if (best) break;
    from = other;
    best = Folding(costs, from).with_limit(high);
  }
  if (!best) return best;
  const Folding folding(costs, from);
  Cost low = high / (d / 2 + 1);
  for (const Cost close = high / kSteps / d; high - low > close;) {
    const Cost middle = low + (high - low) / 2;
    if (auto found = folding.with_limit(middle)) {
      best = std::move(found);
      high = middle;
    } else {
      low = middle;
    }
  }
  return best;
}

}  // namespace pd2
