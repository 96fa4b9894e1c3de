#include "planner/plan/blocks.h"

#include "core/infinity.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <set>

namespace pd2 {
namespace {

// What the chosen blocks save, need and take together.
BlockChoice sum_of(std::span<const BlockChoice> blocks, const std::vector<int>& chosen) {
  BlockChoice sum;
  for (const int i : chosen) {
    sum.saves += blocks[i].saves;
    sum.again = std::max(sum.again, blocks[i].again);
    sum.takes += blocks[i].takes;
  }
  return sum;
}

bool is_enough(const BlockChoice& sum, double bytes) { return sum.saves - sum.again >= bytes; }

std::vector<int> members(unsigned set) {
  std::vector<int> members;
  for (; set != 0; set &= set - 1) members.push_back(std::countr_zero(set));
  return members;
}

std::optional<std::vector<int>> by_enumeration(std::span<const BlockChoice> blocks, double bytes) {
  std::optional<unsigned> best;
  double least = kInfinity;
  for (unsigned set = 0; set < 1u << blocks.size(); ++set) {
    const BlockChoice of_set = sum_of(blocks, members(set));
    if (!is_enough(of_set, bytes) || of_set.takes >= least) continue;
    best = set;
    least = of_set.takes;
  }
  if (!best) return std::nullopt;
  return members(*best);
}

// The first of the sorted ones, of at most `bound` bytes again, that are enough.
std::optional<std::vector<int>> first_enough(std::span<const BlockChoice> blocks,
                                             const std::vector<int>& sorted, double bound,
                                             double bytes) {
  std::vector<int> chosen;
  BlockChoice now;
  for (const int i : sorted) {
    if (is_enough(now, bytes)) break;
    if (blocks[i].again > bound || blocks[i].saves <= 0) continue;
    chosen.push_back(i);
    now.saves += blocks[i].saves;
    now.again = std::max(now.again, blocks[i].again);
  }
  if (!is_enough(now, bytes)) return std::nullopt;
  return chosen;
}

void drop_superfluous(std::span<const BlockChoice> blocks, std::vector<int>& chosen, double bytes) {
  std::ranges::stable_sort(chosen, std::ranges::greater{}, [&](int i) { return blocks[i].takes; });
  double saves = sum_of(blocks, chosen).saves;
  const double again = sum_of(blocks, chosen).again;
  std::erase_if(chosen, [&](int i) {
    if (saves - blocks[i].saves - again < bytes) return false;
    saves -= blocks[i].saves;
    return true;
  });
}

std::optional<std::vector<int>> greedily(std::span<const BlockChoice> blocks, double bytes) {
  std::vector<int> sorted(blocks.size());
  std::iota(sorted.begin(), sorted.end(), 0);
  std::ranges::stable_sort(sorted, [&](int a, int b) {
    return blocks[a].takes * blocks[b].saves < blocks[b].takes * blocks[a].saves;
  });
  std::set<double> bounds;
  for (const BlockChoice& block : blocks) bounds.insert(block.again);
  std::optional<std::vector<int>> best;
  double least = kInfinity;
  for (const double bound : bounds) {
    std::optional<std::vector<int>> chosen = first_enough(blocks, sorted, bound, bytes);
    if (!chosen) continue;
    drop_superfluous(blocks, *chosen, bytes);
    const double takes = sum_of(blocks, *chosen).takes;
    if (takes >= least) continue;
    least = takes;
    best = std::move(chosen);
  }
  if (best) std::ranges::sort(*best);
  return best;
}

}  // namespace

std::optional<std::vector<int>> choose_blocks(std::span<const BlockChoice> blocks, double bytes) {
  if (bytes <= 0) return std::vector<int>{};
  const bool is_small = blocks.size() <= kMostEnumeratedBlocks;
  return is_small ? by_enumeration(blocks, bytes) : greedily(blocks, bytes);
}

}  // namespace pd2
