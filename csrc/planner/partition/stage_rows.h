// Which stages [first, end) cost no more than a limit, as rows of bits; and whether some of them
// cover all pieces.

#pragma once

#include "planner/partition/stage_memory.h"

#include <cstdint>
#include <vector>

namespace pd2 {

// Positions 0 .. n as bits, 64 in a word.
using Positions = std::vector<std::uint64_t>;

inline bool has(const Positions& positions, int i) { return positions[i / 64] >> (i % 64) & 1; }
inline void add(Positions& positions, int i) { positions[i / 64] |= std::uint64_t{1} << (i % 64); }

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
  StageRows(const SplitCosts& costs, const MemoryFit& memory, Cost low, Cost high);

  std::vector<Pending> pending;

  void set(const Pending& stage, bool value);

  // The words that may have ends of a stage k which begins at `first`: none if the last one is
  // before the first one.
  int first_word(int first) const { return (first + 1) / 64; }
  int last_word(int k, int first) const;
  // The ends of a word that have their bit set and are within the memory of stage k.
  std::uint64_t ends(int k, int first, int word) const;
  bool allows(int k, int first, int end) const;
  // The first piece from which a stage, by its compute, may reach the position.
  int first_that_reaches(int position) const;
  // Whether one of `ends` is allowed.
  bool meets(int k, int first, const Positions& ends) const;
  // Adds to `ends` all that are allowed.
  void add_ends(int k, int first, Positions& ends) const;

  // The farthest end that was looked at.
  int last_end(int first) const { return row_end_[first]; }

 private:
  void add_row(int first, Cost low, Cost high);
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
std::vector<Positions> coverable(const SplitCosts& costs, const StageRows& rows, Cost limit);

}  // namespace pd2
