#include "core/partition/cheapest_split.h"

#include "core/check.h"

#include <algorithm>
#include <array>
#include <bit>

namespace pd2 {
namespace {

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

// least[k][a]: the least sum of messages of stages k .. d - 1 over the pieces from a on.
class LeastRest {
 public:
  LeastRest(const SplitCosts& costs, const StageRows& rows, const std::vector<Positions>& on)
      : rows_(rows) {
    const int n = costs.num_pieces();
    const int d = costs.num_stages();
    least.assign(d + 1, std::vector<Cost>(64 * (n / 64 + 1), kInfiniteCost));
    of_word_.assign(d + 1, std::vector<Cost>(n / 64 + 1, kInfiniteCost));
    record(d, n, 0);
    for (int a = n - 1; a >= 0; --a) {
      known_.assign(n / 64 + 1, false);
      messages_.resize(n / 64 + 1);
      for (int k = 0; k < d; ++k) {
        if (has(on[k], a)) record(k, a, find(k, a));
      }
    }
  }

  std::vector<std::vector<Cost>> least;

 private:
  void record(int k, int a, Cost cost) {
    least[k][a] = cost;
    of_word_[k][a / 64] = std::min(of_word_[k][a / 64], cost);
  }

  // Looks into the most promising word first, then into those that may have something better.
  Cost find(int k, int a) {
    const auto bound = [&](int word) {
      return rows_.least_messages(a, word) + of_word_[k + 1][word];
    };
    const int begin = rows_.first_word(a);
    const int last = rows_.last_word(k, a);
    int first = begin;
    for (int word = begin; word <= last; ++word) {
      if (bound(word) < bound(first)) first = word;
    }
    Cost best = kInfiniteCost;
    if (first <= last) look_into(k, a, first, best);
    for (int word = begin; word <= last; ++word) {
      if (word != first && bound(word) < best) look_into(k, a, word, best);
    }
    return best;
  }

  void look_into(int k, int a, int word, Cost& best) {
    if (!known_[word]) messages_[word] = rows_.messages(a, word);
    known_[word] = true;
    const Cost* rest = &least[k + 1][64 * word];
    const std::uint64_t ends = rows_.ends(k, a, word);
    if (ends == ~std::uint64_t{0}) {
      for (int i = 0; i < 64; ++i) best = std::min(best, rest[i] + messages_[word][i]);
    } else {
      for (std::uint64_t left = ends; left != 0; left &= left - 1) {
        const int i = std::countr_zero(left);
        best = std::min(best, rest[i] + messages_[word][i]);
      }
    }
  }

  const StageRows& rows_;
  std::vector<std::vector<Cost>> of_word_;  // the least of each word
  // The messages of the stages that begin at the current piece, by word, where known.
  std::vector<char> known_;
  std::vector<std::array<Cost, 64>> messages_;
};

}  // namespace

std::vector<int> cheapest_split(const SplitCosts& costs, const StageRows& rows,
                                const std::vector<Positions>& from) {
  const std::vector<Positions> on = on_some_split(costs, rows, from);
  const std::vector<std::vector<Cost>> rest = LeastRest(costs, rows, on).least;
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
