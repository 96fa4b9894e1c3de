#include "planner/simulate/fastest_v.h"

#include "core/check.h"
#include "core/schedule/v_shape.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

namespace pd2 {
namespace {

constexpr int kMostSteps = 6;  // a period: with longer ways a microbatch only waits
constexpr double kEqual = 1.001;

struct TriedV {
  int halves = 0;  // in flight on the fullest rank
  int least = 0;   // microbatches of a batch
  std::string name;
  std::vector<Period> periods;
};

std::vector<TriedV> tried_vs(int ranks) {
  std::vector<TriedV> all;
  constexpr int n = kMostSteps;
  for (int i = 0; i < n * n * n * n; ++i) {
    const std::array steps = {i / (n * n * n) + 1, i / (n * n) % n + 1, i / n % n + 1, i % n + 1};
    const VSteps way = {steps[0], steps[1], steps[2], steps[3]};
    auto periods = v_periods(ranks, way);
    if (!periods) continue;
    TriedV& made = all.emplace_back();
    for (const Period& period : *periods) {
      made.halves = std::max(made.halves, most_halves_in_flight(period));
    }
    made.least = least_microbatches(ranks, way);
    made.name = "2bw_v";
    for (const int step : steps) made.name += "_" + std::to_string(step);
    made.periods = std::move(*periods);
  }
  std::ranges::stable_sort(all, {}, &TriedV::halves);
  return all;
}

}  // namespace

std::size_t first_of_fastest(const std::vector<double>& periods) {
  const double shortest = *std::ranges::min_element(periods);
  return std::ranges::find_if(periods, [&](double each) { return each <= shortest * kEqual; }) -
         periods.begin();
}

Schedule fastest_v_schedule(int ranks, int num_microbatches, double in_flight, const Costs& costs) {
  PD2_CHECK(ranks >= 1, "num_stages: ", 2 * ranks, ": a V has two stages a rank");
  PD2_CHECK(num_microbatches >= 1, "num_microbatches: ", num_microbatches,
            ": a batch needs num_microbatches >= 1");
  const std::vector<TriedV> all = tried_vs(ranks);
  int fewest = all.front().halves, least = all.front().least;
  for (const TriedV& one : all) least = std::min(least, one.least);
  PD2_CHECK(in_flight >= fewest / 2.0, "in_flight: ", in_flight, ", ranks: ", ranks,
            ": a V needs in_flight >= ", fewest / 2.0);
  PD2_CHECK(num_microbatches >= least, "num_microbatches: ", num_microbatches, ", ranks: ", ranks,
            ": a V needs num_microbatches >= ", least);
  const auto make = [&](const TriedV& one) {
    return make_v_schedule(one.name, one.periods, num_microbatches, false);
  };
  std::vector<const TriedV*> fitting;
  std::vector<double> periods;
  for (const TriedV& one : all) {
    if (one.halves > 2 * in_flight || one.least > num_microbatches) continue;
    fitting.push_back(&one);
    periods.push_back(simulate(make(one), costs, 4).period);
  }
  PD2_CHECK(!fitting.empty(), "in_flight: ", in_flight, ", num_microbatches: ", num_microbatches,
            ": no V of ", ranks, " ranks needs as few of both");
  return make(*fitting[first_of_fastest(periods)]);
}

}  // namespace pd2
