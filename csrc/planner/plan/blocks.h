// Which blocks of a rank are recomputed, so that it fits its memory at the least time.

#pragma once

#include <optional>
#include <span>
#include <vector>

namespace pd2 {

struct BlockChoice {
  double saves = 0;  // bytes, of all microbatches in flight
  double again = 0;  // bytes that it takes while it runs again; only one block does at a time
  double takes = 0;  // seconds of a microbatch
};

// Up to as many blocks choose_blocks() is exact, by enumeration.
inline constexpr int kMostEnumeratedBlocks = 12;

// The blocks, in rising order, that save at least `bytes` beyond the largest `again` of them, in
// the least time; none if all blocks do not. Above kMostEnumeratedBlocks greedy: for each bound on
// `again`, by seconds per saved byte, then those that turn out to be superfluous are dropped, the
// longest first. With equal blocks that is exact, too.
std::optional<std::vector<int>> choose_blocks(std::span<const BlockChoice> blocks, double bytes);

}  // namespace pd2
