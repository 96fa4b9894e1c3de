// What the planner knows of a schedule without making it: its rule, the most microbatches in
// flight, how long a batch takes.

#pragma once

#include "core/simulate/simulate.h"

#include <optional>
#include <ranges>
#include <string>
#include <string_view>
#include <vector>

namespace pd2 {

struct ScheduleRule {
  std::string_view name;
  int num_versions;       // 2: batches overlap; 1: every batch drains
  bool is_split;          // I before W
  bool has_chunks;        // several stages a rank
  bool is_bidirectional;  // every stage on two ranks

  bool is_flushed() const { return num_versions == 1; }
  bool is_eager() const { return name == "2bw_eager"; }
  bool has_exact_closed_form() const { return !is_flushed() || name == "gpipe"; }
};

// The planner chooses among 2bw, 2bw_eager, 1f1b, gpipe, interleaved, zero_bubble and chimera.
// Throws ValueError for another name.
const ScheduleRule& schedule_rule(std::string_view name);
std::vector<std::string> planned_schedules();

// first, first + step, ...: no vector, as the planner asks too often for one.
inline auto in_steps(int first, int step, int count) {
  return std::views::iota(0, count) |
         std::views::transform([first, step](int i) { return first + i * step; });
}

struct PipelineShape {
  const ScheduleRule* rule = nullptr;
  int ranks = 1;
  int stages_per_rank = 1;
  int num_microbatches = 1;  // of the batch; of which chimera's pipelines take half each

  int depth() const { return ranks * stages_per_rank; }
  int stages_sharing_a_rank() const { return rule->is_bidirectional ? 2 : stages_per_rank; }
  // The model's stages on a rank; of chimera two, of which the second is the other pipeline's.
  auto stages_on(int rank) const {
    return in_steps(rank, rule->is_bidirectional ? ranks - 1 - 2 * rank : ranks,
                    stages_sharing_a_rank());
  }
  // The ranks that hold a stage: of chimera two.
  auto ranks_of(int stage) const {
    const int rank = stage % ranks;
    return in_steps(rank, ranks - 1 - 2 * rank, rule->is_bidirectional ? 2 : 1);
  }
};

// The least m >= at_least that the schedule's rule (core/schedule/generate.h) allows; none: no m
// does.
std::optional<int> least_microbatches(const ScheduleRule& rule, int ranks, int stages_per_rank,
                                      int at_least);

// max_in_flight() of the stage (of chimera's either copy), in closed form.
int most_in_flight(const PipelineShape& shape, int stage);

// Most microbatches between running their forward again and the end of B or W: 1 where B is whole.
int most_recomputed(const PipelineShape& shape, int stage);

// Simulating costs time by actions. 20,000 are simulated in a few milliseconds.
inline constexpr double kMostSimulatedActions = 20'000;

// About how many actions simulate() runs to measure the period.
double simulated_actions(const PipelineShape& shape);

// Seconds per batch in the steady state by formula. Of gpipe exact, of 2bw and 2bw_eager where no
// stage updates for longer than a microbatch's work (else up to a quarter too short), of the others
// an estimate. Of a flush, a later stage that updates longer counts as if it were the first, if
// that takes longer. With s = F + B (+ R), c a hop, U an update and its all-reduce, per stage;
// where skips make a longer way between two stages than the hops do, that way counts; and no batch
// takes less than its messages over one link:
//
//   2bw, 2bw_eager  a cycle from stage i to j > i and back, by the next microbatch that i may
//   begin:
//                   m max over i <= j of (sum of F + B over i .. j, + R of j, + 2 sum of c) / n,
//                   n = j - i + 1 for 2bw, 2 (j - i) + 1 for 2bw_eager (R of other stages hides
//                   behind messages); U beside, by its deadline
//   1f1b            there and back once, F + B + 2 c of all stages, and m - 1 of 2bw's cycles
//   gpipe           two flow shops: sum of F + (m - 1) max F, sum of B + (m - 1) max (B + R); links
//                   are machines of both. The first R of some stage may be longer than what it
//                   waits for: of the ways to a stage, its R and back the longest
//   interleaved     m times the busiest rank, and (p - 1) / (p v) of one microbatch's way
//   zero_bubble     m s of stage j, and F + I + 2 c of the stages before, of which j W's fill gaps
//   chimera         m / 2 times the busiest rank, and d - 2 gaps of B, further units' of B - F
double closed_form_period(const PipelineShape& shape, const Costs& costs);

// Of a microbatch: F, I, W and what is recomputed.
double work_of(const StageCosts& stage);

struct StepTime {
  double seconds = 0;  // of a batch
  double bubble = 0;   // share of it in which the busiest rank is idle
};

// simulate()'s period. With more than kMostSimulatedActions the closed form, or where that is an
// estimate the straight line through the periods of two smaller batches, if these have no more:
// beyond a few rounds of the pipeline every further one takes as long as the last. Never less than
// the busiest rank's work.
StepTime step_time(const PipelineShape& shape, const Costs& costs);

// The busiest rank's seconds of a batch. An update that goes on beside the next microbatches delays
// none of them by waiting, but it takes its device's time; the sum over replicas before it does
// not.
double busiest_rank(const PipelineShape& shape, const Costs& costs);

}  // namespace pd2
