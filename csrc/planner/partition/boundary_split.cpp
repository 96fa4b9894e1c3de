#include "planner/partition/boundary_split.h"

#include "core/infinity.h"

#include <algorithm>
#include <limits>

namespace pd2 {
namespace {

constexpr double kPrecision = 1e-3;
constexpr double kSlower[] = {1, 1.03, 1.1, 1.2, 1.4, 1.7, 2};

enum class Measure { kCycles, kMessages };

class Splits {
 public:
  explicit Splits(const BoundarySplitProblem& problem)
      : problem_(problem),
        num_stages_(static_cast<int>(problem.slowness.size())),
        num_pieces_(static_cast<int>(problem.bytes.size()) - 1),
        value_(num_stages_, std::vector<double>(num_pieces_ + 1)),
        first_(num_stages_, std::vector<int>(num_pieces_ + 1)) {}

  // Whether a split keeps the limit; split() is the best one then.
  bool keep(Measure measure, double limit) {
    for (int k = 0; k < num_stages_; ++k) {
      std::ranges::fill(value_[k], kInfinity);
      const int last = num_stages_ - 1 - k;  // stages to come
      for (int end = last == 0 ? num_pieces_ : k + 1; end <= num_pieces_ - last; ++end) {
        set(measure, k, end, limit);
      }
    }
    return value_.back()[num_pieces_] < kInfinity;
  }

  // The least limit that a split keeps, if any does.
  double least_limit(Measure measure) {
    double speed = 0;
    for (const double slowness : problem_.slowness) speed += 1 / slowness;
    double low = problem_.seconds_before.back() / speed;
    if (low == 0) return kMost;
    double high = low;
    while (!keep(measure, high)) {
      low = high;
      high *= 1.5;
    }
    while (high - low > kPrecision * high) {
      const double middle = low + (high - low) / 2;
      (keep(measure, middle) ? high : low) = middle;
    }
    return high;
  }

  std::vector<int> split() const {
    std::vector<int> firsts(num_stages_);
    int end = num_pieces_;
    for (int k = num_stages_ - 1; k >= 0; --k) end = firsts[k] = first_[k][end];
    return firsts;
  }

  static constexpr double kMost = std::numeric_limits<double>::max() / 4;

 private:
  // Finds the stage k that ends here with the least value.
  void set(Measure measure, int k, int end, double limit) {
    const bool is_last = k + 1 == num_stages_;
    const double transfer = is_last ? 0 : problem_.bytes[end] * problem_.seconds_per_byte[k];
    if (transfer > limit) return;
    double least = kInfinity;
    for (int first = end - 1; first >= k; --first) {
      const double seconds =
          problem_.slowness[k] * (problem_.seconds_before[end] - problem_.seconds_before[first]);
      if (seconds > limit || !problem_.fits(k, first, end)) break;
      if (k == 0 && first > 0) continue;
      double value = k == 0 ? 0 : value_[k - 1][first];
      if (measure == Measure::kCycles) {
        value = seconds + (k == 0 ? -limit : std::max(-limit, value));
        if (value > 0) continue;
      }
      if (value >= least) continue;
      least = value;
      first_[k][end] = first;
    }
    if (least == kInfinity) return;
    value_[k][end] = least;
    if (is_last) return;
    value_[k][end] += 2 * (problem_.latency[k] + transfer);
    if (measure == Measure::kCycles) value_[k][end] -= problem_.step * limit;
  }

  const BoundarySplitProblem& problem_;
  const int num_stages_;
  const int num_pieces_;
  // The value by stage and the position it ends at: the excess of the longest cycle up to the next
  // stage over the limit for the stages in it, or the sum of the messages so far.
  std::vector<std::vector<double>> value_;
  std::vector<std::vector<int>> first_;  // where that stage begins
};

}  // namespace

std::vector<std::vector<int>> split_by_boundaries(const BoundarySplitProblem& problem) {
  Splits splits(problem);
  std::vector<std::vector<int>> found;
  const auto add = [&](Measure measure, double limit) {
    if (!splits.keep(measure, limit)) return;
    std::vector<int> split = splits.split();
    if (std::ranges::find(found, split) == found.end()) found.push_back(std::move(split));
  };
  if (!splits.keep(Measure::kMessages, Splits::kMost)) return found;
  add(Measure::kCycles, splits.least_limit(Measure::kCycles));
  const double least = splits.least_limit(Measure::kMessages);
  for (const double slower : kSlower) add(Measure::kMessages, slower * least);
  return found;
}

}  // namespace pd2
