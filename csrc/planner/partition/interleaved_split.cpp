#include "planner/partition/interleaved_split.h"

#include "core/check.h"
#include "planner/partition/split_costs.h"

#include <algorithm>
#include <tuple>

namespace pd2 {
namespace {

constexpr int kMostSteps = 1 << 16;  // of the search through all splits
constexpr int kMostRounds = 100;     // of moving cuts
constexpr int kMostStagesForPairs = 64;

struct Stage {
  Cost cost = 0;
  HeldBytes held;

  // The needs of a rank for several stages together.
  Stage operator+(const Stage& other) const { return {cost + other.cost, held + other.held}; }
};

// Less is better.
struct Quality {
  double excess = 0;  // bytes above the limits, of all ranks
  Cost slowest = 0;
  double squares = 0;  // of the ranks' costs: so that one of two equally slow ranks may get faster

  auto key() const { return std::tie(excess, slowest, squares); }
};

class Ranks {
 public:
  Ranks(const SplitCosts& costs, int num_ranks) : costs_(costs), num_ranks_(num_ranks) {}

  Stage stage(int s, int first, int end) const {
    return stage(s, first, end, costs_.messages(first, end));
  }
  Stage stage(int s, int first, int end, const Messages& messages) const {
    const StageMemoryRule& rule = costs_.rule(s);
    return {costs_.compute(rule.slowness, first, end) + messages.cost(),
            costs_.held(rule, first, end, messages.received)};
  }

  Quality quality(const std::vector<Stage>& stages) const {
    Quality quality;
    for (int rank = 0; rank < num_ranks_; ++rank) {
      Stage sum;
      for (int s = rank; s < costs_.num_stages(); s += num_ranks_) {
        sum = sum + stages[s];
      }
      quality.excess += std::max(0.0, sum.held.all() - costs_.rule(rank).limit);
      quality.slowest = std::max(quality.slowest, sum.cost);
      quality.squares += costs_.seconds(sum.cost) * costs_.seconds(sum.cost);
    }
    return quality;
  }

  int num_ranks() const { return num_ranks_; }
  const SplitCosts& costs() const { return costs_; }

 private:
  const SplitCosts& costs_;
  int num_ranks_;
};

// A split that cuts can be moved in. `ends` are positions between pieces, ends[s] that of stage s.
class Movable {
 public:
  Movable(const Ranks& ranks, std::vector<int> ends) : ranks_(ranks), ends_(std::move(ends)) {
    for (int s = 0; s < num_stages(); ++s) stages_.push_back(ranks_.stage(s, begin(s), ends_[s]));
    quality_ = ranks_.quality(stages_);
  }

  int begin(int s) const { return s == 0 ? 0 : ends_[s - 1]; }
  const Quality& quality() const { return quality_; }

  void improve() {
    for (int round = 0; round < kMostRounds; ++round) {
      bool improved = false;
      for (int s = 0; s + 1 < num_stages(); ++s) {
        for (int distance = ends_.back(); distance > 0; distance /= 2) {
          improved = move({{s, distance}}) || move({{s, -distance}}) || improved;
        }
      }
      if (!improved && num_stages() <= kMostStagesForPairs) improved = move_a_pair();
      if (!improved) return;
    }
  }

 private:
  struct Move {
    int cut = 0;
    int distance = 0;
  };

  int num_stages() const { return static_cast<int>(ends_.size()); }

  bool move_a_pair() {
    for (int s = 0; s + 1 < num_stages(); ++s) {
      for (int t = s + 1; t + 1 < num_stages(); ++t) {
        for (const auto& [first, second] : {std::pair(1, 1), {1, -1}, {-1, 1}, {-1, -1}}) {
          if (move({{s, first}, {t, second}})) return true;
        }
      }
    }
    return false;
  }

  // Keeps the moves if they make the split better.
  bool move(const std::vector<Move>& moves) {
    std::vector<int> ends = ends_;
    for (const Move& move : moves) ends[move.cut] += move.distance;
    std::swap(ends, ends_);
    bool legal = true;
    for (const Move& move : moves) {
      legal = legal && begin(move.cut) < ends_[move.cut] && ends_[move.cut] < ends_[move.cut + 1];
    }
    if (legal) {
      std::vector<Stage> stages = stages_;
      for (const Move& move : moves) {
        for (const int s : {move.cut, move.cut + 1}) {
          stages[s] = ranks_.stage(s, begin(s), ends_[s]);
        }
      }
      const Quality quality = ranks_.quality(stages);
      if (quality.key() < quality_.key()) {
        quality_ = quality;
        stages_ = std::move(stages);
        return true;
      }
    }
    std::swap(ends, ends_);
    return false;
  }

  const Ranks& ranks_;
  std::vector<int> ends_;
  std::vector<Stage> stages_;
  Quality quality_;
};

// Goes through all splits whose slowest rank may be faster than `best`.
class Search {
 public:
  Search(const Ranks& ranks, std::optional<Cost> best)
      : ranks_(ranks), best_(best.value_or(kInfiniteCost)), sums_(ranks.num_ranks()) {}

  // Returns whether the search came to its end.
  bool run() {
    extend(0, 0);
    return steps_ <= kMostSteps;
  }
  const std::vector<int>& ends() const { return found_; }  // empty: none is faster

 private:
  // Adds stages s... over the pieces from `first` on.
  void extend(int s, int first) {
    const SplitCosts& costs = ranks_.costs();
    const int n = costs.num_pieces();
    const int num_stages = costs.num_stages();
    if (s == num_stages) {
      found_ = ends_;
      best_ = 0;
      for (const Stage& sum : sums_) best_ = std::max(best_, sum.cost);
      return;
    }
    const StageMemoryRule& rule = costs.rule(s);
    Stage& sum = sums_[s % ranks_.num_ranks()];
    const Stage before = sum;
    Messages messages;
    const int last = n - (num_stages - 1 - s);
    for (int end = first + 1; end <= last && ++steps_ <= kMostSteps; ++end) {
      costs.extend(messages, first, end - 1);
      sum = before + ranks_.stage(s, first, end, messages);
      const Cost compute = sum.cost - messages.cost();
      if (compute >= best_ || sum.held.all() > rule.limit) break;
      if (sum.cost >= best_ || (s + 1 == num_stages && end < n)) continue;
      ends_.push_back(end);
      extend(s + 1, end);
      ends_.pop_back();
    }
    sum = before;
  }

  const Ranks& ranks_;
  Cost best_;
  std::vector<Stage> sums_;
  std::vector<int> ends_;
  std::vector<int> found_;
  int steps_ = 0;
};

// The ends, as positions between pieces, of the split with the fastest slowest stage where every
// stage has this share of its rank's limit. None fits: empty.
std::vector<int> ends_of_fastest_stages(const SplitCosts& costs, double share) {
  std::vector<double> limits;
  for (int s = 0; s < costs.num_stages(); ++s) limits.push_back(share * costs.rule(s).limit);
  std::vector<int> ends = first_pieces(costs, limits).value_or(std::vector<int>());
  if (ends.empty()) return ends;
  ends.erase(ends.begin());
  ends.push_back(costs.num_pieces());
  return ends;
}

}  // namespace

std::optional<InterleavedSplit> split_interleaved(const StageSplitProblem& problem, int num_ranks) {
  const SplitCosts costs(problem);
  const int num_stages = costs.num_stages();
  PD2_CHECK(num_ranks >= 1 && num_stages % num_ranks == 0, "num_ranks: ", num_ranks,
            ", stages: ", num_stages, ": every rank needs the same number of stages");
  for (int s = num_ranks; s < num_stages; ++s) {
    PD2_CHECK(costs.rule(s).limit == costs.rule(s - num_ranks).limit, "stages[", s,
              "].limit: ", costs.rule(s).limit, ", stages[", s - num_ranks,
              "].limit: ", costs.rule(s - num_ranks).limit,
              ": the stages of a rank share its memory");
  }

  const Ranks ranks(costs, num_ranks);
  std::optional<Movable> best;
  for (const double share : {1.0, 1.0 * num_ranks / num_stages}) {
    std::vector<int> ends = ends_of_fastest_stages(costs, share);
    if (ends.empty()) continue;
    Movable split(ranks, std::move(ends));
    split.improve();
    if (!best || split.quality().key() < best->quality().key()) best.emplace(std::move(split));
  }
  const bool fits = best && best->quality().excess == 0;

  InterleavedSplit result;
  Search search(ranks, fits ? std::optional(best->quality().slowest) : std::nullopt);
  result.exact = search.run();
  if (!fits && search.ends().empty()) return std::nullopt;
  const Movable found = search.ends().empty() ? *best : Movable(ranks, search.ends());
  result.split.slowest = costs.seconds(found.quality().slowest);
  for (int s = 0; s < num_stages; ++s) {
    result.split.first_layers.push_back(costs.first_layer(found.begin(s)));
  }
  return result;
}

}  // namespace pd2
