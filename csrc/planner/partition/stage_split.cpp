#include "planner/partition/stage_split.h"

#include "core/check.h"
#include "core/infinity.h"
#include "planner/partition/split_costs.h"

#include <algorithm>
#include <bit>
#include <cstdint>
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

// ---------------------------------------------------------------- stages as bits

// Positions 0 .. n as bits, 64 in a word.
using Positions = std::vector<std::uint64_t>;

bool has(const Positions& positions, int i) { return positions[i / 64] >> (i % 64) & 1; }
void add(Positions& positions, int i) { positions[i / 64] |= std::uint64_t{1} << (i % 64); }

// For a search between two limits, `low`, below which no split is, and `high`, which one achieves.
// Looks at every stage whose compute alone is at most `high`. Keeps a row for each first piece: the
// words of positions that hold its ends, with one bit for each end (and each slowness).
class StageRows {
 public:
  // A stage that costs low .. high.
  struct Pending {
    Cost cost = 0;
    int slowness = 0;
    int first = 0;
    int end = 0;
  };

  // Has the bits of stages below `low`; those of low .. high become `pending`.
  StageRows(const SplitCosts& costs, const MemoryFit& memory, Cost low, Cost high)
      : costs_(costs), memory_(memory), bits_(costs.slownesses().size()) {
    const int n = costs.num_pieces();
    const double fastest = *std::min_element(costs.slownesses().begin(), costs.slownesses().end());
    int end = 0;
    for (int a = 0; a < n; ++a) {
      end = std::max(end, a);
      while (end < n && costs.compute(fastest, a, end + 1) <= high) ++end;
      int within = a;  // the memory of any stage
      for (const std::vector<int>& farthest : memory.farthest) {
        within = std::max(within, farthest[a]);
      }
      reach_.push_back(end);
      row_end_.push_back(std::min(end, within));
      add_row(a, low, high);
    }
  }

  std::vector<Pending> pending;

  void set(const Pending& stage, bool value) {
    const std::uint64_t bit = std::uint64_t{1} << (stage.end % 64);
    std::uint64_t& bits = bits_[stage.slowness][index(stage.first, stage.end / 64)];
    bits = value ? bits | bit : bits & ~bit;
  }

  // The words that may have ends of a stage k which begins at `first`: none if the last one is
  // before the first one.
  int first_word(int first) const { return (first + 1) / 64; }
  int last_word(int k, int first) const {
    const int last = std::min(row_end_[first], memory_.farthest[k][first]);
    return last > first ? last / 64 : first_word(first) - 1;
  }

  // The ends of a word that have their bit set and are within the memory of stage k.
  std::uint64_t ends(int k, int first, int word) const {
    const std::uint64_t bits = bits_[costs_.slowness_of(k)][index(first, word)];
    const int more = memory_.farthest[k][first] - 64 * word;  // ends of the word beyond its first
    return more >= 63 ? bits : bits & ~(~std::uint64_t{1} << more);
  }

  bool allows(int k, int first, int end) const {
    return end > first && end / 64 <= last_word(k, first) &&
           (ends(k, first, end / 64) >> (end % 64) & 1);
  }

  // The first piece from which a stage, by its compute, may reach the position.
  int first_that_reaches(int position) const {
    return static_cast<int>(std::ranges::lower_bound(reach_, position) - reach_.begin());
  }

  // Whether one of the positions is an allowed end.
  bool meets(int k, int first, const Positions& positions) const {
    for (int word = first_word(first); word <= last_word(k, first); ++word) {
      if (ends(k, first, word) & positions[word]) return true;
    }
    return false;
  }

  // Adds all ends that are allowed to the positions.
  void add_ends(int k, int first, Positions& positions) const {
    for (int word = first_word(first); word <= last_word(k, first); ++word) {
      positions[word] |= ends(k, first, word);
    }
  }

  // The farthest end that was looked at.
  int last_end(int first) const { return row_end_[first]; }

 private:
  void add_row(int first, Cost low, Cost high) {
    const int end = row_end_[first];
    row_begin_.push_back(bits_.front().size());
    if (end == first) return;
    for (auto& bits : bits_) bits.resize(row_begin_[first] + (end / 64 - first_word(first) + 1), 0);
    Messages messages;
    for (int b = first + 1; b <= end; ++b) {
      costs_.extend(messages, first, b - 1);
      for (int s = 0; s < static_cast<int>(bits_.size()); ++s) {
        const Cost cost = costs_.compute(costs_.slownesses()[s], first, b) + messages.cost();
        if (cost < low) {
          set({cost, s, first, b}, true);
        } else if (cost <= high) {
          pending.push_back({cost, s, first, b});
        }
      }
    }
  }

  std::size_t index(int first, int word) const {
    return row_begin_[first] + static_cast<std::size_t>(word - first_word(first));
  }

  const SplitCosts& costs_;
  const MemoryFit& memory_;
  std::vector<int> reach_;              // by first piece: the farthest end by compute, increasing
  std::vector<int> row_end_;            // by first piece: the farthest end looked at
  std::vector<std::size_t> row_begin_;  // by first piece: where its words begin
  std::vector<std::vector<std::uint64_t>> bits_;  // by slowness
};

// [k]: from where stages k .. d - 1 can cover the rest, all of them allowed. For k > 0 left out:
// positions that no stages 0 .. k - 1 of at most `limit` reach.
std::vector<Positions> coverable(const SplitCosts& costs, const StageRows& rows, Cost limit) {
  const int n = costs.num_pieces();
  const int d = costs.num_stages();
  // The last position that stages 0 .. k - 1 may reach by their compute. The margin is for what
  // rounding a product with the slowness took away.
  std::vector<int> reached(d, 0);
  double capacity = 0;
  for (int k = 1; k < d; ++k) {
    capacity += (static_cast<double>(limit) + 1) / costs.rule(k - 1).slowness * (1 + 1e-9);
    int& last = reached[k] = reached[k - 1];
    while (last < n && static_cast<double>(costs.compute(0, last + 1)) <= capacity) ++last;
  }

  std::vector<Positions> from(d + 1, Positions(n / 64 + 1, 0));
  add(from[d], n);
  int next = n;  // the first position of from[k + 1]
  for (int k = d - 1; k >= 0; --k) {
    const int last = std::min(reached[k], n - (d - k));
    int first = n;
    for (int a = std::max(k, rows.first_that_reaches(next)); a <= last; ++a) {
      if (!rows.meets(k, a, from[k + 1])) continue;
      add(from[k], a);
      first = std::min(first, a);
    }
    next = first;
  }
  return from;
}

// ---------------------------------------------------------------- the split

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

std::optional<StageSplit> split_stages(const StageSplitProblem& problem) {
  const SplitCosts costs(problem);
  const MemoryFit memory = fit_memory(costs);
  if (!memory.fits()) return std::nullopt;
  const Cost low = lower_bound(costs);
  const Cost high = upper_bound(costs, memory, low);
  StageRows rows(costs, memory, low, high);
  const Cost slowest = smallest_slowest(costs, rows, high);
  StageSplit split = {.first_layers = {}, .slowest = costs.seconds(slowest)};
  for (const int piece : cheapest_split(costs, rows, coverable(costs, rows, slowest))) {
    split.first_layers.push_back(costs.first_layer(piece));
  }
  return split;
}

}  // namespace pd2
