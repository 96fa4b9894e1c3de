#include "planner/plan/pipeline_shape.h"

#include "core/check.h"
#include "core/schedule/generate.h"
#include "planner/simulate/simulate.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>

namespace pd2 {
namespace {

// Forwards of a rank's chunk among its first `count`: p microbatches of each chunk in turn.
int of_chunk(int count, int chunk, int p, int v) {
  const int round = p * v;
  return count / round * p + std::clamp(count % round - chunk * p, 0, p);
}

// Step k does the k-th forward, then the backward that is the warm-up's length behind. While a
// chunk's p forwards come the number in flight only grows, so the last of them has the most.
int most_in_flight_of_chunk(const PipelineShape& shape, int stage) {
  const int p = shape.ranks;
  const int v = shape.stages_per_rank;
  const int chunk = stage / p;
  const int lag = shape.method->lag_of(shape.sizes(), stage % p);
  const int steps = std::min(shape.num_microbatches * v, lag + 2 * p * v);
  int most = 0;
  for (int end = (chunk + 1) * p; end <= steps; end += p * v) {
    const int done = of_chunk(std::max(0, end - 1 - lag), v - 1 - chunk, p, v);
    most = std::max(most, of_chunk(end, chunk, p, v) - done);
  }
  return most;
}

// Adds what is at most another's in both numbers to none, and drops those that are.
void add_together(std::vector<std::array<int, 2>>& all, const std::array<int, 2>& now) {
  const auto is_within = [](const std::array<int, 2>& a, const std::array<int, 2>& b) {
    return a[0] <= b[0] && a[1] <= b[1];
  };
  if (std::ranges::any_of(all, [&](const auto& each) { return is_within(now, each); })) return;
  std::erase_if(all, [&](const auto& each) { return is_within(each, now); });
  all.push_back(now);
}

// Every rank repeats its period for ever.
VCounts counts_of_repeated(const PipelineShape& shape) {
  VCounts counts;
  counts.in_flight.resize(shape.depth());
  counts.recomputed.resize(shape.depth());
  const std::vector<Period> periods = v_periods(shape.ranks, shape.method->v).value();
  for (int stage = 0; stage < shape.depth(); ++stage) {
    const int rank = shape.rank_of(stage);
    const int chunk = stage == rank ? 0 : 1;
    const auto most_from = [&](ActionKind from) {
      return most_between(periods[rank], chunk, from, ActionKind::kWeightGrad);
    };
    counts.in_flight[stage] = most_from(ActionKind::kForward);
    counts.recomputed[stage] = most_from(ActionKind::kInputGrad);
  }
  counts.together.resize(shape.ranks);
  for (int rank = 0; rank < shape.ranks; ++rank) {
    for (int place = 0; place < static_cast<int>(periods[rank].size()); ++place) {
      add_together(counts.together[rank], in_flight_at(periods[rank], place));
    }
  }
  return counts;
}

VCounts counts_of_drained(const PipelineShape& shape) {
  const int d = shape.depth();
  const Schedule schedule = make_schedule(shape.method->name, d, shape.num_microbatches, 2);
  VCounts counts;
  std::vector<int> in_flight(d, 0), recomputed(d, 0);
  counts.in_flight = in_flight;
  counts.recomputed = recomputed;
  const auto count = [](int& now, int& most, bool begins, bool ends) {
    now += begins;
    most = std::max(most, now);
    now -= ends;
  };
  counts.together.resize(shape.ranks);
  for (int rank = 0; rank < shape.ranks; ++rank) {
    for (const Action& action : schedule.ranks[rank].steady) {
      const int k = action.stage;
      const bool ends = action.kind == ActionKind::kWeightGrad;
      count(in_flight[k], counts.in_flight[k], action.kind == ActionKind::kForward, ends);
      count(recomputed[k], counts.recomputed[k], action.kind == ActionKind::kInputGrad, ends);
      add_together(counts.together[rank], {in_flight[rank], in_flight[d - 1 - rank]});
    }
  }
  Costs costs;
  costs.stages.assign(d, {.forward = 1, .input_grad = 1, .weight_grad = 1});
  counts.idle_slots = second_batch(schedule, costs) - 6 * shape.num_microbatches;
  return counts;
}

}  // namespace

const VCounts& counts_of_v(PipelineShape shape) {
  static std::mutex mutex;
  static std::map<std::tuple<std::string_view, int, int>, VCounts> found;
  // After a few rounds of the pipeline no further microbatch changes anything.
  shape.num_microbatches =
      shape.method->is_flushed() ? std::min(shape.num_microbatches, 4 * shape.ranks) : 0;
  const std::lock_guard lock(mutex);
  const auto [place, is_new] =
      found.try_emplace({shape.method->name, shape.ranks, shape.num_microbatches});
  if (is_new) {
    place->second =
        shape.method->is_flushed() ? counts_of_drained(shape) : counts_of_repeated(shape);
  }
  return place->second;
}

std::vector<std::string> planned_schedules() { return schedule_names(&ScheduleMethod::is_planned); }

const ScheduleMethod& planned_method(std::string_view name) {
  const ScheduleMethod* method = find_method(name);
  PD2_CHECK(method != nullptr && method->is_planned, "schedules: \"", name,
            "\": the planner chooses among ", joined(planned_schedules()));
  return *method;
}

std::optional<int> least_microbatches(const ScheduleMethod& method, int ranks, int stages_per_rank,
                                      int at_least) {
  if (stages_per_rank > 1 && !method.has_chunks) return std::nullopt;
  if (method.is_v() && (stages_per_rank != 2 || ranks > kMostRanksOfPlannedV)) {
    return std::nullopt;
  }
  if (method.is_bidirectional() && ranks % 2 != 0) return std::nullopt;
  const int multiple_of = method.microbatches_multiple_of(ranks);
  const int m = std::max({method.least_microbatches(ranks, stages_per_rank), at_least, 1});
  if (method.weights == Weights::kStashed && m > 1) return std::nullopt;
  return (m + multiple_of - 1) / multiple_of * multiple_of;
}

int most_in_flight(const PipelineShape& shape, int stage) {
  const int d = shape.depth();
  const int m = shape.num_microbatches;
  const ScheduleMethod& method = *shape.method;
  if (method.is_bidirectional()) return std::min({d / 2, m / 2, d - stage});
  if (method.is_v()) return counts_of_v(shape).in_flight[stage];
  if (method.has_chunks) return most_in_flight_of_chunk(shape, stage);
  const int most = method.lag_of(shape.sizes(), stage) + most_recomputed(shape, stage);
  return method.is_flushed() ? std::min(most, m) : most;
}

int in_flight_with_others(const PipelineShape& shape, int stage) {
  if (!shape.method->is_v()) return most_in_flight(shape, stage);
  const int rank = shape.rank_of(stage);
  const std::vector<std::array<int, 2>>& together = counts_of_v(shape).together[rank];
  const auto most =
      std::ranges::max_element(together, {}, [](const auto& each) { return each[0] + each[1]; });
  return (*most)[stage == rank ? 0 : 1];
}

int most_recomputed(const PipelineShape& shape, int stage) {
  if (shape.method->is_v()) return counts_of_v(shape).recomputed[stage];
  return std::min(shape.method->weight_lag_of(stage) + 1, shape.num_microbatches);
}

PlannedShape planned_shape(std::string_view name, const ScheduleSizes& sizes) {
  const ScheduleMethod& method = planned_method(name);
  PD2_CHECK(!method.is_v() || sizes.num_stages <= 2 * kMostRanksOfPlannedV,
            "num_stages: ", sizes.num_stages, ", schedule: ", name, ": plans have a V of at most ",
            kMostRanksOfPlannedV, " ranks");
  check_sizes(method, sizes);
  const PipelineShape shape = {&method, sizes.ranks(), sizes.stages_per_rank,
                               sizes.num_microbatches};
  PlannedShape planned;
  planned.mean_delay = shape.mean_delay();
  planned.recomputes_together = shape.recomputes_together();
  for (int stage = 0; stage < shape.depth(); ++stage) {
    planned.num_versions.push_back(shape.num_versions(stage));
    planned.most_in_flight.push_back(most_in_flight(shape, stage));
    planned.most_recomputed.push_back(most_recomputed(shape, stage));
  }
  for (int rank = 0; rank < shape.ranks; ++rank) {
    const auto on_rank = shape.stages_on(rank);
    planned.stages_of_ranks.emplace_back(on_rank.begin(), on_rank.end());
    std::vector<std::vector<int>>& in_flight = planned.in_flight_of_ranks.emplace_back();
    if (method.is_v()) {
      for (const auto& [first, second] : counts_of_v(shape).together[rank]) {
        in_flight.push_back({first, second});
      }
    } else {
      in_flight.emplace_back();
      for (const int stage : on_rank) in_flight[0].push_back(planned.most_in_flight[stage]);
    }
    if (method.is_bidirectional()) planned.stages_of_ranks.back().back() += shape.depth();
  }
  return planned;
}

}  // namespace pd2
