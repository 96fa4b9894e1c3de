// What the planner knows of a pipeline without making its schedule: who holds which stages, and how
// many microbatches they have in flight.

#pragma once

#include "core/schedule/methods.h"

#include <algorithm>
#include <array>
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
  ScheduleSizes sizes() const { return {depth(), num_microbatches, stages_per_rank}; }
  // That one copy of a stage does.
  double microbatches_of_copy() const {
    return num_microbatches * (method->is_bidirectional() ? 0.5 : 1);
  }
  // Weight stashing (arXiv 1806.03377): those of the microbatches between F and B.
  int num_versions(int stage) const {
    if (is_stashed()) return depth() - stage;
    return method->is_flushed() ? 1 : 2;
  }
  // Batches by which forwards are late, on average; where some alone are late, by an update of one
  // slot.
  double mean_delay() const {
    if (method->is_flushed()) return 0;
    if (is_stashed()) return (depth() - 1) / 2.0;
    return method->is_fresh ? (depth() + 1) / (2.0 * num_microbatches) : 1;
  }
  bool is_stashed() const { return method->weights == Weights::kStashed; }
  int stages_sharing_a_rank() const { return method->is_bidirectional() ? 2 : stages_per_rank; }
  // Rank r holds the stages r and depth() - 1 - r: in a V, or the second as the other pipeline's.
  bool is_folded() const { return method->is_bidirectional() || method->is_v(); }
  // Whether recomputed activations of a rank's stages exist at once: of one from I to W, between
  // which the other one's may come.
  bool recomputes_together() const { return method->is_split && stages_per_rank > 1; }
  // The model's stages on a rank; of two pipelines two, of which the second is the other's.
  auto stages_on(int rank) const {
    return in_steps(rank, is_folded() ? depth() - 1 - 2 * rank : ranks, stages_sharing_a_rank());
  }
  // The rank that holds a stage; of two pipelines the first one's.
  int rank_of(int stage) const {
    return method->is_v() ? std::min(stage, depth() - 1 - stage) : stage % ranks;
  }
  // The ranks that hold a stage: of two pipelines two.
  auto ranks_of(int stage) const {
    const int rank = rank_of(stage);
    return in_steps(rank, ranks - 1 - 2 * rank, method->is_bidirectional() ? 2 : 1);
  }
};

// The planner counts in the lists of a V, which a deeper one would make long.
inline constexpr int kMostRanksOfPlannedV = 64;

// The least m >= at_least that the method allows; none: no m does, or it is a V of too many ranks.
std::optional<int> least_microbatches(const ScheduleMethod& method, int ranks, int stages_per_rank,
                                      int at_least);

// What is counted in the lists of a V, which has no short formulas.
struct VCounts {
  std::vector<int> in_flight;   // by stage: the most microbatches from F to the end of W
  std::vector<int> recomputed;  // from I to the end of W
  // By rank, of both stages at once: none is at most another in both.
  std::vector<std::vector<std::array<int, 2>>> together;
  double idle_slots = 0;  // of a batch that drains, where all actions take one
};

// Counted once for each; threads may ask together.
const VCounts& counts_of_v(PipelineShape shape);

// max_in_flight() of the stage (of two pipelines either copy), in closed form but for a V.
int most_in_flight(const PipelineShape& shape, int stage);

// The stage's share of the most that its rank's stages have in flight at once, counted in
// microbatches of either; where they are not counted together the stage's own most.
int in_flight_with_others(const PipelineShape& shape, int stage);

// Most microbatches between running their forward again and the end of B or W: 1 where B is whole.
int most_recomputed(const PipelineShape& shape, int stage);

// The same numbers for the reader of a plan.
struct PlannedShape {
  double mean_delay = 0;
  std::vector<int> num_versions;     // by stage
  std::vector<int> most_in_flight;   // by stage
  std::vector<int> most_recomputed;  // by stage
  bool recomputes_together = false;  // of a rank's stages
  // By rank of a replica. With two pipelines stage d + i is the second one's copy of stage i.
  std::vector<std::vector<int>> stages_of_ranks;
  // By rank, the most microbatches that its stages, in that order, have in flight at once: one or
  // several numbers for each, of which those count that need the most memory.
  std::vector<std::vector<std::vector<int>>> in_flight_of_ranks;
};

// Throws ValueError for a schedule that is not planned, for sizes that it has not, and for a V of
// too many ranks.
PlannedShape planned_shape(std::string_view name, const ScheduleSizes& sizes);

}  // namespace pd2
