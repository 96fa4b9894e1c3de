// What the planner knows of a pipeline without making its schedule: who holds which stages, and how
// many microbatches they have in flight.

#pragma once

#include "core/schedule/methods.h"

#include <optional>
#include <ranges>
#include <string>
#include <string_view>
#include <vector>

namespace pd2 {

// The planner chooses among the methods that have is_planned. Throws ValueError for another name.
const ScheduleMethod& planned_method(std::string_view name);
std::vector<std::string> planned_schedules();

// first, first + step, ...: no vector, as the planner asks too often for one.
inline auto in_steps(int first, int step, int count) {
  return std::views::iota(0, count) |
         std::views::transform([first, step](int i) { return first + i * step; });
}

struct PipelineShape {
  const ScheduleMethod* method = nullptr;
  int ranks = 1;
  int stages_per_rank = 1;
  int num_microbatches = 1;  // of the batch; two pipelines take half each

  int depth() const { return ranks * stages_per_rank; }
  int num_versions() const { return method->is_flushed() ? 1 : 2; }
  int stages_sharing_a_rank() const { return method->is_bidirectional() ? 2 : stages_per_rank; }
  // The model's stages on a rank; of two pipelines two, of which the second is the other's.
  auto stages_on(int rank) const {
    return in_steps(rank, method->is_bidirectional() ? ranks - 1 - 2 * rank : ranks,
                    stages_sharing_a_rank());
  }
  // The ranks that hold a stage: of two pipelines two.
  auto ranks_of(int stage) const {
    const int rank = stage % ranks;
    return in_steps(rank, ranks - 1 - 2 * rank, method->is_bidirectional() ? 2 : 1);
  }
};

// The least m >= at_least that the method allows; none: no m does.
std::optional<int> least_microbatches(const ScheduleMethod& method, int ranks, int stages_per_rank,
                                      int at_least);

// max_in_flight() of the stage (of two pipelines either copy), in closed form.
int most_in_flight(const PipelineShape& shape, int stage);

// Most microbatches between running their forward again and the end of B or W: 1 where B is whole.
int most_recomputed(const PipelineShape& shape, int stage);

// The same numbers for the reader of a plan.
struct PlannedShape {
  int num_versions = 1;
  std::vector<int> most_in_flight;   // by stage
  std::vector<int> most_recomputed;  // by stage
  // By rank of a replica. With two pipelines stage d + i is the second one's copy of stage i.
  std::vector<std::vector<int>> stages_of_ranks;
};

// Throws ValueError for a schedule that is not planned, and for sizes that it has not.
PlannedShape planned_shape(std::string_view name, const ScheduleSizes& sizes);

}  // namespace pd2
