#include "core/schedule.h"

#include "core/check.h"
#include "core/unroll.h"

#include <algorithm>
#include <numeric>

namespace pd2 {
namespace {

// Appends actions of one stage to one list.
class StageList {
 public:
  StageList(std::vector<Action>& list, int stage) : list_(list), stage_(stage) {}

  void add(ActionKind kind, int microbatch) {
    list_.push_back({.stage = stage_, .kind = kind, .microbatch = microbatch});
  }
  void add(ActionKind kind, int begin, int end) {
    for (int microbatch = begin; microbatch < end; ++microbatch) add(kind, microbatch);
  }

 private:
  std::vector<Action>& list_;
  int stage_;
};

using enum ActionKind;

RankActions make_2bw(int stage, int d, int m) {
  // How many microbatches a backward is behind its forward: the way to the last stage and back.
  const int lag = d - 1 - stage;
  RankActions rank;

  StageList prologue(rank.prologue, stage);
  prologue.add(kForward, 0, lag);
  for (int k = lag; k < m; ++k) {
    prologue.add(kForward, k);
    prologue.add(kBackward, k - lag);
  }
  if (lag == 0) prologue.add(kUpdate, m - 1);

  StageList steady(rank.steady, stage);
  for (int k = 0; k < m; ++k) {
    steady.add(kForward, k);
    steady.add(kBackward, k - lag);
    if (k - lag == -1) steady.add(kUpdate, -1);
  }
  if (lag == 0) steady.add(kUpdate, m - 1);

  StageList epilogue(rank.epilogue, stage);
  epilogue.add(kBackward, m - lag, m);
  if (lag > 0) epilogue.add(kUpdate, m - 1);
  return rank;
}

RankActions make_synchronous(int stage, int m, int num_warmup) {
  RankActions rank;
  StageList batch(rank.prologue, stage);
  batch.add(kForward, 0, num_warmup);
  for (int k = num_warmup; k < m; ++k) {
    batch.add(kForward, k);
    batch.add(kBackward, k - num_warmup);
  }
  batch.add(kBackward, m - num_warmup, m);
  batch.add(kUpdate, m - 1);
  rank.steady = rank.prologue;
  return rank;
}

}  // namespace

std::string to_string(const Action& action) {
  return detail::concat(action.stage, static_cast<char>(action.kind), action.microbatch);
}

std::vector<std::string> schedule_names() { return {"2bw", "1f1b", "gpipe"}; }

Schedule make_schedule(std::string_view name, int num_stages, int num_microbatches) {
  const std::vector<std::string> names = schedule_names();
  if (std::find(names.begin(), names.end(), name) == names.end()) {
    std::string known;
    for (const std::string& each : names) {
      if (!known.empty()) known += ", ";
      known += each;
    }
    detail::throw_value_error(
        detail::concat("schedule: \"", name, "\": the known schedules are ", known));
  }
  const int d = num_stages;
  const int m = num_microbatches;
  PD2_CHECK(d >= 1, "num_stages: ", d, ": a pipeline needs num_stages >= 1");
  PD2_CHECK(m >= 1, "num_microbatches: ", m, ": a batch needs num_microbatches >= 1");
  const bool is_2bw = name == "2bw";
  PD2_CHECK(!is_2bw || m >= d, "num_microbatches: ", m, ", num_stages: ", d,
            ": 2bw needs num_microbatches >= num_stages");

  Schedule schedule;
  schedule.name = name;
  schedule.num_stages = d;
  schedule.num_microbatches = m;
  schedule.delay = is_2bw ? 1 : 0;
  schedule.placement.resize(d);
  std::iota(schedule.placement.begin(), schedule.placement.end(), 0);
  schedule.num_versions.assign(d, schedule.delay + 1);
  for (int stage = 0; stage < d; ++stage) {
    if (is_2bw) {
      schedule.ranks.push_back(make_2bw(stage, d, m));
    } else {
      const int num_warmup = name == "gpipe" ? m : std::min(d - 1 - stage, m);
      schedule.ranks.push_back(make_synchronous(stage, m, num_warmup));
    }
  }
  return schedule;
}

int max_in_flight(const Schedule& schedule, int stage) {
  PD2_CHECK(stage >= 0 && stage < static_cast<int>(schedule.placement.size()), "stage: ", stage,
            ", num_stages: ", schedule.placement.size(), ": stages count from 0 to num_stages - 1");
  int in_flight = 0;
  int most = 0;
  // Steady batches repeat each other: the second one shows what all later ones do.
  for (const Step& step : unroll(schedule, schedule.placement[stage], 0, 3)) {
    if (step.stage != stage) continue;
    if (step.kind == kForward) ++in_flight;
    if (step.kind == kBackward || step.kind == kWeightGrad) --in_flight;
    most = std::max(most, in_flight);
  }
  return most;
}

}  // namespace pd2
