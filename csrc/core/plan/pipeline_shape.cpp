#include "core/plan/pipeline_shape.h"

#include "core/check.h"

#include <algorithm>

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
  const int lag = 2 * (p - 1 - stage % p) + (v - 1) * p;
  const int steps = std::min(shape.num_microbatches * v, lag + 2 * p * v);
  int most = 0;
  for (int end = (chunk + 1) * p; end <= steps; end += p * v) {
    const int done = of_chunk(std::max(0, end - 1 - lag), v - 1 - chunk, p, v);
    most = std::max(most, of_chunk(end, chunk, p, v) - done);
  }
  return most;
}

}  // namespace

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
  if (method.is_bidirectional() && ranks % 2 != 0) return std::nullopt;
  const int multiple_of = method.microbatches_multiple_of(ranks);
  const int m = std::max({method.least_microbatches(ranks, stages_per_rank), at_least, 1});
  return (m + multiple_of - 1) / multiple_of * multiple_of;
}

int most_in_flight(const PipelineShape& shape, int stage) {
  const int d = shape.depth();
  const int m = shape.num_microbatches;
  const ScheduleMethod& method = *shape.method;
  if (method.is_bidirectional()) return std::min({d / 2, m / 2, d - stage});
  if (method.has_chunks) return most_in_flight_of_chunk(shape, stage);
  if (method.keeps_whole_batch()) return m;
  if (method.is_split) return std::min(d, m);
  return std::min(method.is_eager() ? 2 * (d - stage) - 1 : d - stage, m);
}

int most_recomputed(const PipelineShape& shape, int stage) {
  return shape.method->is_split ? std::min(stage + 1, shape.num_microbatches) : 1;
}

PlannedShape planned_shape(std::string_view name, const ScheduleSizes& sizes) {
  const ScheduleMethod& method = planned_method(name);
  check_sizes(method, sizes);
  const PipelineShape shape = {&method, sizes.ranks(), sizes.stages_per_rank,
                               sizes.num_microbatches};
  PlannedShape planned;
  planned.num_versions = shape.num_versions();
  for (int stage = 0; stage < shape.depth(); ++stage) {
    planned.most_in_flight.push_back(most_in_flight(shape, stage));
    planned.most_recomputed.push_back(most_recomputed(shape, stage));
  }
  for (int rank = 0; rank < shape.ranks; ++rank) {
    const auto on_rank = shape.stages_on(rank);
    planned.stages_of_ranks.emplace_back(on_rank.begin(), on_rank.end());
    if (method.is_bidirectional()) planned.stages_of_ranks.back().back() += shape.depth();
  }
  return planned;
}

}  // namespace pd2
