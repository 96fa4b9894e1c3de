// How long a batch takes: by formula, or simulated.

#pragma once

#include "planner/plan/pipeline_shape.h"
#include "planner/simulate/simulate.h"

namespace pd2 {

// Simulating costs time by actions. 20,000 are simulated in a few milliseconds.
inline constexpr double kMostSimulatedActions = 20'000;

// About how many actions simulate() runs to measure the period.
double simulated_actions(const PipelineShape& shape);

// Seconds per batch in the steady state by formula. Of gpipe exact, of 2bw, 2bw_eager and 2bw in a
// V where no stage updates for longer than a microbatch's work (else up to a quarter too short), of
// the others an estimate. Of a flush, a later stage that updates longer counts as if it were the
// first, if that takes longer. With s = F + B (+ R), c a hop, U an update and its all-reduce, per
// stage; where skips make a longer way between two stages than the hops do, that way counts; and no
// batch takes less than its messages over one link:
//
//   2bw, 2bw_eager  a cycle from stage i to j > i and back, by the next microbatch that i may
//   begin:
//                   m max over i <= j of (sum of F + B over i .. j, + R of j, + 2 sum of c) / n,
//                   n = j - i + 1 for 2bw, 2 (j - i) + 1 for 2bw_eager (R of other stages hides
//                   behind messages); U beside, by its deadline
//   1f1b            there and back once, F + B + 2 c of all stages, and m - 1 of 2bw's cycles
//   pipedream       the same cycles, with U of the first stage: each F waits for the last update
//   gpipe           two flow shops: sum of F + (m - 1) max F, sum of B + (m - 1) max (B + R); links
//                   are machines of both. The first R of some stage may be longer than what it
//                   waits for: of the ways to a stage, its R and back the longest
//   interleaved     m times the busiest rank, and (p - 1) / (p v) of one microbatch's way
//   zero_bubble     m s of stage j, and F + I + 2 c of the stages before, of which j W's fill gaps
//   chimera         m / 2 times the busiest rank, and d - 2 gaps of B, further units' of B - F
//   in a V          m seconds_per_microbatch_of_v(), and U beside as of 2bw; of a flush, as many
//                   mean actions as slots are idle where all take one, and 2 c of the p stages down
double period_by_formula(const PipelineShape& shape, const Costs& costs);

// Seconds that the ranks of a V take for each further microbatch while nothing drains. All repeat
// their periods, so each action waits for others of the same microbatch or of one that is a fixed
// number behind: this is the most seconds by microbatch around any circle of such waits. A link
// that is busy all the time is not counted.
double seconds_per_microbatch_of_v(const PipelineShape& shape, const Costs& costs);

// Whether period_by_formula() is no estimate.
bool has_exact_formula(const ScheduleMethod& method);

// The work of a microbatch, of all stages that the rank holds.
double work_of_rank(const PipelineShape& shape, const Costs& costs, int rank);

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
// none of them by waiting, but it takes its device's time, or its host's, which is another's beside
// it; the sum over replicas before it does not.
double busiest_rank(const PipelineShape& shape, const Costs& costs);

}  // namespace pd2
