#include "core/schedule/generate.h"

#include "core/check.h"
#include "core/schedule/generate_chimera.h"

#include <algorithm>
#include <array>
#include <utility>

namespace pd2 {
namespace {

using enum ActionKind;

// Sizes of a pipeline, as in the header.
struct Shape {
  int d = 1;
  int m = 1;
  int v = 1;

  int p() const { return d / v; }
};

enum class Weights { kFlushed, kTwoVersions, kStashed };

// In which order a rank takes its chunks: p microbatches of each in turn, or all m.
enum class Order { kDepthFirst, kBreadthFirst };

// All of these schedules are one pattern: step k of a rank does its k-th forward, the backward that
// is `lag` steps behind, and, if backwards are split, the W that is `weight_lag` steps behind its
// I.
struct Method {
  std::string_view name;
  Weights weights;
  bool is_split;
  bool has_chunks;
  Order order;
  int (*lag)(const Shape& shape, int rank);
  int (*weight_lag)(const Shape& shape, int rank);
};

// The way to the last stage and back.
int round_trip(const Shape& s, int rank) { return s.d - 1 - rank; }
// Twice: each message may take as long as a step.
int long_round_trip(const Shape& s, int rank) { return 2 * (s.d - 1 - rank); }
// Megatron's warm-up.
int chunked_round_trip(const Shape& s, int rank) {
  return 2 * (s.p() - 1 - rank) + (s.v - 1) * s.p();
}
int whole_batch(const Shape& s, int) { return s.m * s.v; }
int none(const Shape&, int) { return 0; }
// As much later as the rank's pipeline fills later: what is in flight is the same everywhere.
int filling(const Shape&, int rank) { return rank; }
int long_filling(const Shape&, int rank) { return 2 * rank; }

constexpr auto kFlushed = Weights::kFlushed;
constexpr auto kTwo = Weights::kTwoVersions;
constexpr auto kDepth = Order::kDepthFirst;
constexpr auto kBreadth = Order::kBreadthFirst;
constexpr std::array kMethods = {
    Method{"2bw", kTwo, false, false, kDepth, round_trip, none},
    Method{"2bw_eager", kTwo, false, false, kDepth, long_round_trip, none},
    Method{"2bw_split", kTwo, true, false, kDepth, round_trip, none},
    Method{"interleaved_2bw", kTwo, false, true, kDepth, chunked_round_trip, none},
    Method{"pipedream", Weights::kStashed, false, false, kDepth, round_trip, none},
    Method{"1f1b", kFlushed, false, false, kDepth, round_trip, none},
    Method{"gpipe", kFlushed, false, false, kDepth, whole_batch, none},
    Method{"interleaved", kFlushed, false, true, kDepth, chunked_round_trip, none},
    Method{"looped_bfs", kFlushed, false, true, kBreadth, whole_batch, none},
    Method{"zero_bubble", kFlushed, true, false, kDepth, round_trip, filling},
    Method{"zero_bubble_2p", kFlushed, true, false, kDepth, long_round_trip, long_filling},
    Method{"interleaved_zero_bubble", kFlushed, true, true, kDepth, round_trip, filling},
};

// Not of that pattern: how many microbatches have their forwards in one slot.
struct Bidirectional {
  std::string_view name;
  int together;
};
constexpr std::array kBidirectional = {
    Bidirectional{"chimera", 1},
    Bidirectional{"chimera_doubled", 2},
};

const Method& find_method(std::string_view name) {
  for (const Method& method : kMethods) {
    if (method.name == name) return method;
  }
  std::string known;
  for (const std::string& each : schedule_names()) {
    if (!known.empty()) known += ", ";
    known += each;
  }
  detail::throw_value_error(
      detail::concat("schedule: \"", name, "\": the known schedules are ", known));
}

void check_sizes(std::string_view name, bool has_chunks, const Shape& s) {
  PD2_CHECK(s.d >= 1, "num_stages: ", s.d, ": a pipeline needs num_stages >= 1");
  PD2_CHECK(s.m >= 1, "num_microbatches: ", s.m, ": a batch needs num_microbatches >= 1");
  PD2_CHECK(s.v >= 1 && s.d % s.v == 0, "num_stages: ", s.d, ", stages_per_rank: ", s.v,
            ": every rank has the same number of stages, so stages_per_rank must divide "
            "num_stages");
  PD2_CHECK(s.v == 1 || has_chunks, "stages_per_rank: ", s.v, ", schedule: ", name,
            ": only interleaved_2bw, interleaved, looped_bfs and interleaved_zero_bubble take more "
            "than 1");
}

void check_shape(const Method& method, const Shape& s) {
  check_sizes(method.name, method.has_chunks, s);
  if (method.weights == Weights::kStashed) {
    PD2_CHECK(s.m == 1, "num_microbatches: ", s.m, ": ", method.name,
              " updates after every microbatch, so num_microbatches must be 1");
  }
  if (method.has_chunks && method.order == Order::kDepthFirst) {
    PD2_CHECK(s.m % s.p() == 0, "num_microbatches: ", s.m, ", ranks: ", s.p(), ": ", method.name,
              " needs num_microbatches to be a multiple of the ranks");
  }
  if (method.weights == Weights::kTwoVersions) {
    // A batch's last backward on rank 0 must come before the batch after the next begins.
    const int lag = method.lag(s, 0);
    const int least = lag / s.v + 1;
    PD2_CHECK(s.m >= least, "num_microbatches: ", s.m, ", num_stages: ", s.d, ": ", method.name,
              " needs num_microbatches >= ",
              method.lag == &round_trip        ? "num_stages"
              : method.lag == &long_round_trip ? "2 * num_stages - 1"
                                               : detail::concat(least));
  }
}

// The lists of one rank.
class RankLists {
 public:
  RankLists(const Method& method, const Shape& shape, int rank)
      : method_(method),
        shape_(shape),
        rank_(rank),
        num_steps_(shape.m * shape.v),
        lag_(method.lag(shape, rank)),
        weight_lag_(method.weight_lag(shape, rank)) {}

  RankActions make() {
    RankActions actions;
    if (method_.weights == Weights::kFlushed) {
      add_steps(actions.prologue, 0, end(), 0, num_steps_);
      actions.steady = actions.prologue;
    } else {
      add_steps(actions.prologue, 0, num_steps_, 0, num_steps_);
      add_steps(actions.steady, 0, num_steps_, -end(), num_steps_);
      add_steps(actions.epilogue, num_steps_, end(), -end(), num_steps_);
    }
    return actions;
  }

 private:
  // Steps after which all of a batch is done.
  int end() const { return num_steps_ + lag_ + weight_lag_; }

  // Steps begin .. end - 1, of which forwards and backwards number first .. last - 1 exist.
  void add_steps(std::vector<Action>& list, int begin, int end, int first, int last) const {
    const auto exists = [&](int index) { return index >= first && index < last; };
    for (int k = begin; k < end; ++k) {
      if (exists(k)) list.push_back(action(kForward, k));
      if (exists(k - lag_)) add_backward(list, method_.is_split ? kInputGrad : kBackward, k - lag_);
      const int weight = k - lag_ - weight_lag_;
      if (method_.is_split && exists(weight)) add_backward(list, kWeightGrad, weight);
    }
  }

  void add_backward(std::vector<Action>& list, ActionKind kind, int index) const {
    list.push_back(action(kind, index));
    const bool is_last = floor_mod(list.back().microbatch, shape_.m) == shape_.m - 1;
    if (is_last && kind != kInputGrad) {
      list.push_back(
          {.stage = list.back().stage, .kind = kUpdate, .microbatch = list.back().microbatch});
    }
  }

  // The rank's index-th forward or backward; negative ones are the previous batches'.
  Action action(ActionKind kind, int index) const {
    const int p = shape_.p();
    const int group = method_.order == Order::kDepthFirst && shape_.v > 1 ? p : shape_.m;
    const int batch = (index - floor_mod(index, num_steps_)) / num_steps_;
    const int within = floor_mod(index, num_steps_);
    const int round = within / (group * shape_.v);
    const int chunk = within % (group * shape_.v) / group;
    const int microbatch = batch * shape_.m + round * group + within % group;
    const int stage = (kind == kForward ? chunk : shape_.v - 1 - chunk) * p + rank_;
    return {.stage = stage, .kind = kind, .microbatch = microbatch};
  }

  static int floor_mod(int a, int b) { return (a % b + b) % b; }

  const Method& method_;
  const Shape& shape_;
  const int rank_;
  const int num_steps_;
  const int lag_;
  const int weight_lag_;
};

}  // namespace

std::vector<std::string> schedule_names() {
  std::vector<std::string> names;
  for (const Method& method : kMethods) names.emplace_back(method.name);
  for (const Bidirectional& method : kBidirectional) names.emplace_back(method.name);
  return names;
}

Schedule make_schedule(std::string_view name, int num_stages, int num_microbatches,
                       int stages_per_rank) {
  const Shape shape = {.d = num_stages, .m = num_microbatches, .v = stages_per_rank};
  for (const Bidirectional& method : kBidirectional) {
    if (method.name != name) continue;
    check_sizes(name, false, shape);
    return make_chimera(name, num_stages, num_microbatches, method.together);
  }
  const Method& method = find_method(name);
  check_shape(method, shape);

  Schedule schedule;
  schedule.name = name;
  schedule.num_stages = num_stages;
  schedule.num_microbatches = num_microbatches;
  for (int stage = 0; stage < num_stages; ++stage) {
    const int delay = method.weights == Weights::kFlushed       ? 0
                      : method.weights == Weights::kTwoVersions ? 1
                                                                : num_stages - 1 - stage;
    schedule.delay.push_back(delay);
    schedule.num_versions.push_back(delay + 1);
    schedule.placement.push_back(stage % shape.p());
  }
  for (int rank = 0; rank < shape.p(); ++rank) {
    schedule.ranks.push_back(RankLists(method, shape, rank).make());
  }
  return schedule;
}

}  // namespace pd2
