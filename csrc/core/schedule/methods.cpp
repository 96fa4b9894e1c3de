#include "core/schedule/methods.h"

#include "core/check.h"

#include <algorithm>
#include <array>

namespace pd2 {
namespace {

constexpr auto kFlushed = Weights::kFlushed;
constexpr auto kTwo = Weights::kTwoVersions;

// clang-format off
constexpr std::array kMethods = {
    ScheduleMethod{.name = "2bw", .weights = kTwo, .is_planned = true},
    ScheduleMethod{.name = "2bw_fresh", .weights = kTwo, .is_fresh = true,
                   .is_planned = true},
    ScheduleMethod{.name = "2bw_eager", .weights = kTwo, .lag = Lag::kLongRoundTrip,
                   .is_planned = true},
    ScheduleMethod{.name = "2bw_split", .weights = kTwo, .is_split = true},
    ScheduleMethod{.name = "interleaved_2bw", .weights = kTwo, .lag = Lag::kChunkedRoundTrip,
                   .has_chunks = true},
    ScheduleMethod{.name = "2bw_v", .weights = kTwo, .is_split = true, .has_chunks = true,
                   .v = {3, 3, 3, 3}, .is_planned = true},
    ScheduleMethod{.name = "2bw_v_two_thirds", .weights = kTwo, .is_split = true,
                   .has_chunks = true, .v = {2, 2, 2, 2}, .is_planned = true},
    ScheduleMethod{.name = "2bw_v_half", .weights = kTwo, .is_split = true, .has_chunks = true,
                   .v = {2, 1, 2, 1}, .is_planned = true},
    ScheduleMethod{.name = "2bw_v_min", .weights = kTwo, .is_split = true, .has_chunks = true,
                   .v = {1, 1, 1, 1}, .is_planned = true},
    ScheduleMethod{.name = "pipedream", .weights = Weights::kStashed, .is_planned = true},
    ScheduleMethod{.name = "1f1b", .is_planned = true},
    ScheduleMethod{.name = "gpipe", .lag = Lag::kWholeBatch, .is_planned = true},
    ScheduleMethod{.name = "interleaved", .lag = Lag::kChunkedRoundTrip, .has_chunks = true,
                   .is_planned = true},
    ScheduleMethod{.name = "looped_bfs", .lag = Lag::kWholeBatch, .has_chunks = true,
                   .order = ChunkOrder::kBreadthFirst},
    ScheduleMethod{.name = "zero_bubble", .is_split = true, .weight_lag = WeightLag::kFilling,
                   .is_planned = true},
    ScheduleMethod{.name = "zero_bubble_2p", .lag = Lag::kLongRoundTrip, .is_split = true,
                   .weight_lag = WeightLag::kLongFilling},
    ScheduleMethod{.name = "interleaved_zero_bubble", .is_split = true,
                   .weight_lag = WeightLag::kFilling, .has_chunks = true},
    ScheduleMethod{.name = "zero_bubble_v", .is_split = true, .has_chunks = true,
                   .v = {3, 3, 3, 3}, .is_planned = true},
    ScheduleMethod{.name = "v_half", .is_split = true, .has_chunks = true, .v = {2, 1, 2, 1},
                   .is_planned = true},
    ScheduleMethod{.name = "v_min", .is_split = true, .has_chunks = true, .v = {1, 1, 1, 1},
                   .is_planned = true},
    ScheduleMethod{.name = "chimera", .microbatches_per_forward_slot = 1, .is_planned = true},
    ScheduleMethod{.name = "chimera_doubled", .microbatches_per_forward_slot = 2},
};
// clang-format on

// "a, b and c": the methods with several stages a rank.
std::string names_with_chunks() {
  std::vector<std::string> names = schedule_names(&ScheduleMethod::has_chunks);
  const std::string last = names.back();
  names.pop_back();
  return joined(names) + " and " + last;
}

// The rule of the least number of microbatches. One with several stages a rank has no short formula
// that an error could compare its two values with.
std::string_view rule_of_least(const ScheduleMethod& method) {
  if (method.is_v()) return "num_microbatches >= about the microbatches in flight on a stage";
  if (method.has_chunks) {
    return "stages_per_rank * num_microbatches > (stages_per_rank + 1) * ranks - 2";
  }
  return method.is_eager() ? "num_microbatches >= 2 * num_stages - 1"
                           : "num_microbatches >= num_stages";
}

}  // namespace

int ScheduleMethod::lag_of(const ScheduleSizes& sizes, int rank) const {
  const int v = sizes.stages_per_rank;
  switch (lag) {
    case Lag::kRoundTrip:
      return sizes.num_stages - 1 - rank;
    case Lag::kLongRoundTrip:
      return 2 * (sizes.num_stages - 1 - rank);
    case Lag::kChunkedRoundTrip:
      return 2 * (sizes.ranks() - 1 - rank) + (v - 1) * sizes.ranks();
    case Lag::kWholeBatch:
      return sizes.num_microbatches * v;
  }
  return 0;
}

int ScheduleMethod::weight_lag_of(int rank) const {
  return rank * (weight_lag == WeightLag::kNone ? 0 : weight_lag == WeightLag::kFilling ? 1 : 2);
}

int ScheduleMethod::least_microbatches(int ranks, int stages_per_rank) const {
  if (weights != Weights::kTwoVersions) return 1;
  if (is_v()) return pd2::least_microbatches(ranks, v);
  // A batch's last backward on rank 0 must come before the batch after the next begins.
  const ScheduleSizes sizes = {.num_stages = ranks * stages_per_rank,
                               .stages_per_rank = stages_per_rank};
  return lag_of(sizes, 0) / stages_per_rank + 1;
}

int ScheduleMethod::microbatches_multiple_of(int ranks) const {
  if (is_bidirectional()) return 2;
  return has_chunks && !is_v() && order == ChunkOrder::kDepthFirst ? ranks : 1;
}

std::span<const ScheduleMethod> schedule_methods() { return kMethods; }

std::vector<std::string> schedule_names(bool ScheduleMethod::*property) {
  std::vector<std::string> names;
  for (const ScheduleMethod& method : kMethods) {
    if (property == nullptr || method.*property) names.emplace_back(method.name);
  }
  return names;
}

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

const ScheduleMethod* find_method(std::string_view name) {
  const auto found = std::ranges::find(kMethods, name, &ScheduleMethod::name);
  return found == kMethods.end() ? nullptr : &*found;
}

std::vector<std::string> size_rules(const ScheduleMethod& method) {
  std::vector<std::string> rules;
  if (method.weights == Weights::kStashed) rules.emplace_back("num_microbatches = 1");
  if (method.is_bidirectional()) {
    rules.emplace_back("num_stages even");
    rules.emplace_back("num_microbatches even");
  } else if (method.microbatches_multiple_of(2) > 1) {
    rules.emplace_back("num_microbatches a multiple of the ranks");
  }
  if (method.weights == Weights::kTwoVersions) rules.emplace_back(rule_of_least(method));
  if (rules.empty()) rules.emplace_back("any num_microbatches");
  rules.emplace_back(method.is_v()       ? "stages_per_rank = 2"
                     : method.has_chunks ? "any stages_per_rank"
                                         : "stages_per_rank = 1");
  return rules;
}

void check_sizes(const ScheduleMethod& method, const ScheduleSizes& sizes) {
  const int d = sizes.num_stages;
  const int m = sizes.num_microbatches;
  const int v = sizes.stages_per_rank;
  PD2_CHECK(d >= 1, "num_stages: ", d, ": a pipeline needs num_stages >= 1");
  PD2_CHECK(m >= 1, "num_microbatches: ", m, ": a batch needs num_microbatches >= 1");
  PD2_CHECK(v >= 1 && d % v == 0, "num_stages: ", d, ", stages_per_rank: ", v,
            ": every rank has the same number of stages, so stages_per_rank must divide "
            "num_stages");
  PD2_CHECK(v == 1 || method.has_chunks, "stages_per_rank: ", v, ", schedule: ", method.name,
            ": only ", names_with_chunks(), " take more than 1");
  PD2_CHECK(v == 2 || !method.is_v(), "stages_per_rank: ", v, ", schedule: ", method.name,
            ": rank r has the stages r and num_stages - 1 - r, so stages_per_rank must be 2");
  if (method.is_bidirectional()) {
    PD2_CHECK(d % 2 == 0, "num_stages: ", d, ", schedule: ", method.name,
              ": two pipelines in opposite directions need an even num_stages");
    PD2_CHECK(m % 2 == 0, "num_microbatches: ", m, ", schedule: ", method.name,
              ": half of a batch goes through each of 2 pipelines, so num_microbatches must be "
              "even");
  }
  PD2_CHECK(method.weights != Weights::kStashed || m == 1, "num_microbatches: ", m, ": ",
            method.name, " updates after every microbatch, so num_microbatches must be 1");
  PD2_CHECK(m % method.microbatches_multiple_of(sizes.ranks()) == 0, "num_microbatches: ", m,
            ", ranks: ", sizes.ranks(), ": ", method.name,
            " needs num_microbatches to be a multiple of the ranks");
  const int least = method.least_microbatches(sizes.ranks(), v);
  PD2_CHECK(m >= least, "num_microbatches: ", m, ", num_stages: ", d, ": ", method.name, " needs ",
            method.has_chunks ? detail::concat("num_microbatches >= ", least)
                              : std::string(rule_of_least(method)));
}

}  // namespace pd2
