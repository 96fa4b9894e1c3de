#include "core/stage_rows.h"

#include <algorithm>

namespace pd2 {
namespace {

constexpr std::size_t kMostSteps = 4 << 20;

}  // namespace

StageRows::StageRows(const StageCosts& costs, const MemoryFit& memory, Cost low, Cost high)
    : costs_(costs),
      memory_(memory),
      bits_(costs.slownesses().size()),
      least_entering_(costs.num_pieces() + 1, 0),
      least_leaving_(costs.num_pieces() + 1, 0) {
  const int n = costs.num_pieces();
  const double fastest = *std::min_element(costs.slownesses().begin(), costs.slownesses().end());
  std::size_t num_stages = 0;
  int end = 0;
  for (int a = 0; a < n; ++a) {
    end = std::max(end, a);
    while (end < n && costs.compute(fastest, a, end + 1) <= high) ++end;
    int within = a;  // the memory of any stage
    for (const std::vector<int>& farthest : memory.farthest) within = std::max(within, farthest[a]);
    row_end_.push_back(std::min(end, within));
    num_stages += row_end_.back() - a;
  }
  while (num_stages / step_ > kMostSteps) step_ *= 2;
  for (int a = 0; a < n; ++a) add_row(a, low, high);
}

void StageRows::add_row(int first, Cost low, Cost high) {
  const int end = row_end_[first];
  row_begin_.push_back(bits_[0].size());
  steps_begin_.push_back(steps_.size());
  if (end == first) return;
  for (auto& bits : bits_) bits.resize(bits.size() + (end / 64 - (first + 1) / 64 + 1), 0);
  Messages messages;
  for (int b = first + 1; b <= end; ++b) {
    costs_.extend(messages, first, b - 1);
    if ((b - first) % step_ == 0) steps_.push_back(messages.cost());
    if (b - first == kNear) {
      least_entering_[first] = messages.entering;
      least_leaving_[b] = messages.leaving;
    }
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
  const std::size_t word = row_begin_[stage.first] + stage.end / 64 - (stage.first + 1) / 64;
  const std::uint64_t bit = std::uint64_t{1} << (stage.end % 64);
  std::uint64_t& bits = bits_[stage.slowness][word];
  bits = value ? bits | bit : bits & ~bit;
}

int StageRows::farthest(int k, int first) const {
  return std::min(row_end_[first], memory_.farthest[k][first]);
}

bool StageRows::allows(int k, int first, int end) const {
  if (end <= first || end > farthest(k, first)) return false;
  const std::size_t word = row_begin_[first] + end / 64 - (first + 1) / 64;
  return bits_[costs_.slowness_of(k)][word] >> (end % 64) & 1;
}

template <typename Each>
bool StageRows::any_word(int k, int first, Each&& each) const {
  const int last = farthest(k, first);
  if (last == first) return false;
  const std::uint64_t* row = &bits_[costs_.slowness_of(k)][row_begin_[first]];
  const int begin = (first + 1) / 64;
  for (int word = begin; word < last / 64; ++word) {
    if (each(row[word - begin], word)) return true;
  }
  const std::uint64_t mask = ~std::uint64_t{0} >> (63 - last % 64);
  return each(row[last / 64 - begin] & mask, last / 64);
}

bool StageRows::meets(int k, int first, const Positions& ends) const {
  return any_word(k, first, [&](std::uint64_t bits, int word) { return (bits & ends[word]) != 0; });
}

void StageRows::add_ends(int k, int first, Positions& ends) const {
  any_word(k, first, [&](std::uint64_t bits, int word) {
    ends[word] |= bits;
    return false;
  });
}

Cost StageRows::message_cost(int first, int end) const {
  const int steps = (end - first) / step_;
  Messages messages;
  if (steps > 0) messages.entering = steps_[steps_begin_[first] + steps - 1];
  for (int piece = first + steps * step_; piece < end; ++piece) {
    costs_.extend(messages, first, piece);
  }
  return messages.cost();
}

std::vector<Positions> coverable(const StageCosts& costs, const StageRows& rows, Cost limit) {
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
  for (int k = d - 1; k >= 0; --k) {
    const int last = std::min(reached[k], n - (d - k));
    for (int a = k; a <= last; ++a) {
      if (rows.meets(k, a, from[k + 1])) add(from[k], a);
    }
  }
  return from;
}

}  // namespace pd2
