// Which stages [first, end) cost no more than a limit, as rows of bits; and whether some of them
// cover all pieces.

#pragma once

#include "core/stage_memory.h"

#include <cstdint>
#include <vector>

namespace pd2 {

// Positions 0 .. n as bits.
using Positions = std::vector<std::uint64_t>;

inline bool has(const Positions& positions, int i) { return positions[i / 64] >> (i % 64) & 1; }
inline void add(Positions& positions, int i) { positions[i / 64] |= std::uint64_t{1} << (i % 64); }

// For a search between two limits, `low`, below which no split is, and `high`, which one achieves.
// Looks at every stage whose compute alone is at most `high`, and keeps by first piece (and by
// slowness) one bit for each, and the message cost: of all or, where they are many, of every
// second, fourth... end, from which the others are a few steps away.
class StageRows {
 public:
  static constexpr int kNear =
      32;  // ends nearer than this are for the caller to look at one by one

  // A stage that costs low .. high.
  struct Pending {
    Cost cost = 0;
    int slowness = 0;
    int first = 0;
    int end = 0;
  };

  // Has the bits of stages below `low`; those of low .. high become `pending`.
  StageRows(const StageCosts& costs, const MemoryFit& memory, Cost low, Cost high);

  std::vector<Pending> pending;

  void set(const Pending& stage, bool value);
  // Is [first, end) a stage with its bit set, and within the memory of stage k.
  bool allows(int k, int first, int end) const;
  // The farthest end that allows() may hold for; `first` if none.
  int farthest(int k, int first) const;
  // Has [first, end) for an end that is in `ends`, as stage k.
  bool meets(int k, int first, const Positions& ends) const;
  // Adds to `ends` all that allows() holds for.
  void add_ends(int k, int first, Positions& ends) const;

  Cost message_cost(int first, int end) const;
  // At most what enters [first, end) for any end > first + kNear.
  Cost least_entering(int first) const { return least_entering_[first]; }
  // At most what leaves [first, end) for any first < end - kNear.
  Cost least_leaving(int end) const { return least_leaving_[end]; }

 private:
  void add_row(int first, Cost low, Cost high);
  // Calls `each(word of the row, mask, word of positions)` until it says true.
  template <typename Each>
  bool any_word(int k, int first, Each&& each) const;

  const StageCosts& costs_;
  const MemoryFit& memory_;
  std::vector<int> row_end_;            // by first piece: the farthest end looked at
  std::vector<std::size_t> row_begin_;  // by first piece: where its words begin
  std::vector<std::vector<std::uint64_t>>
      bits_;  // by slowness; a row begins with the word of first + 1
  int step_ = 1;
  std::vector<std::size_t> steps_begin_;  // by first piece
  std::vector<Cost> steps_;               // message costs of [a, a + step), [a, a + 2 step)...
  std::vector<Cost> least_entering_;
  std::vector<Cost> least_leaving_;
};

// [k]: from where stages k .. d - 1 can cover the rest, each with its bit set and within its
// memory. For k > 0 left out: positions that no stages 0 .. k - 1 of at most `limit` reach.
std::vector<Positions> coverable(const StageCosts& costs, const StageRows& rows, Cost limit);

}  // namespace pd2
