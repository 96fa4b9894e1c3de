#include "planner/partition/stage_rows.h"

#include <algorithm>

namespace pd2 {

StageRows::StageRows(const SplitCosts& costs, const MemoryFit& memory, Cost low, Cost high)
    : costs_(costs), memory_(memory), bits_(costs.slownesses().size()) {
  const int n = costs.num_pieces();
  const double fastest = *std::min_element(costs.slownesses().begin(), costs.slownesses().end());
  int end = 0;
  for (int a = 0; a < n; ++a) {
    end = std::max(end, a);
    while (end < n && costs.compute(fastest, a, end + 1) <= high) ++end;
    int within = a;  // the memory of any stage
    for (const std::vector<int>& farthest : memory.farthest) within = std::max(within, farthest[a]);
    reach_.push_back(end);
    row_end_.push_back(std::min(end, within));
    add_row(a, low, high);
  }
}

void StageRows::add_row(int first, Cost low, Cost high) {
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

void StageRows::set(const Pending& stage, bool value) {
  const std::uint64_t bit = std::uint64_t{1} << (stage.end % 64);
  std::uint64_t& bits = bits_[stage.slowness][index(stage.first, stage.end / 64)];
  bits = value ? bits | bit : bits & ~bit;
}

int StageRows::last_word(int k, int first) const {
  const int last = std::min(row_end_[first], memory_.farthest[k][first]);
  return last > first ? last / 64 : first_word(first) - 1;
}

std::uint64_t StageRows::ends(int k, int first, int word) const {
  const std::uint64_t bits = bits_[costs_.slowness_of(k)][index(first, word)];
  const int more = memory_.farthest[k][first] - 64 * word;  // ends of the word beyond its first
  return more >= 63 ? bits : bits & ~(~std::uint64_t{1} << more);
}

bool StageRows::allows(int k, int first, int end) const {
  return end > first && end / 64 <= last_word(k, first) &&
         (ends(k, first, end / 64) >> (end % 64) & 1);
}

int StageRows::first_that_reaches(int position) const {
  return static_cast<int>(std::ranges::lower_bound(reach_, position) - reach_.begin());
}

bool StageRows::meets(int k, int first, const Positions& positions) const {
  for (int word = first_word(first); word <= last_word(k, first); ++word) {
    if (ends(k, first, word) & positions[word]) return true;
  }
  return false;
}

void StageRows::add_ends(int k, int first, Positions& positions) const {
  for (int word = first_word(first); word <= last_word(k, first); ++word) {
    positions[word] |= ends(k, first, word);
  }
}

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

}  // namespace pd2
