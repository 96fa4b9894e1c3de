// Time and memory of a schedule: its actions with their costs, as discrete events.

#pragma once

#include "core/schedule/schedule.h"

#include <array>
#include <optional>
#include <utility>
#include <vector>

namespace pd2 {

// What a stage costs, in seconds and bytes: of one microbatch, updates of one batch, weights of one
// version.
struct StageCosts {
  double forward = 0;
  double input_grad = 0;   // I; a B takes I + W
  double weight_grad = 0;  // W
  // Running a forward again before each B or I, while its message may be under way. 0: the
  // activations are kept.
  double recompute = 0;
  double all_reduce = 0;  // of the gradients over replicas and copies, before each update
  double update = 0;
  double activation_bytes = 0;  // kept from the start of a microbatch's F to the end of its B or W,
                                // with recompute from that on
  double input_bytes = 0;       // with recompute: kept from the start of F
  double weight_bytes = 0;      // of one version
  double gradient_bytes = 0;
  double state_bytes = 0;  // the optimizer's

  double seconds(ActionKind kind) const;
  // The work of a microbatch: F, I, W and what is recomputed.
  double work() const { return forward + input_grad + weight_grad + recompute; }
};

inline constexpr std::array<std::pair<const char*, double StageCosts::*>, 11> kStageCosts = {{
    {"forward", &StageCosts::forward},
    {"input_grad", &StageCosts::input_grad},
    {"weight_grad", &StageCosts::weight_grad},
    {"recompute", &StageCosts::recompute},
    {"all_reduce", &StageCosts::all_reduce},
    {"update", &StageCosts::update},
    {"activation_bytes", &StageCosts::activation_bytes},
    {"input_bytes", &StageCosts::input_bytes},
    {"weight_bytes", &StageCosts::weight_bytes},
    {"gradient_bytes", &StageCosts::gradient_bytes},
    {"state_bytes", &StageCosts::state_bytes},
}};

// From stage i to stage i + 1, and the same back for the gradients. Of two stages on one rank:
// free.
struct EdgeCosts {
  double latency = 0;    // seconds
  double bandwidth = 0;  // bytes per second in each direction; 0 or infinite: no time for the bytes
  double message_bytes = 0;

  // For how long a message keeps the edge busy, and from its start to its arrival.
  double busy_seconds() const { return bandwidth > 0 ? message_bytes / bandwidth : 0; }
  double seconds() const { return latency + busy_seconds(); }
};

// What stage `to`, which is no neighbour, reads of stage `from`, and its gradient.
struct SkipCosts {
  int from = 0;
  int to = 0;  // from + 2 or more
  EdgeCosts edge;
};

// Optimizers that step in the host's memory: a stage's gradients go down to it, and the weights
// that a step there makes come up. Each rank has two copy engines, one for each direction, and a
// host that steps; all its stages share them.
//
//   compute   B  B  B(last)     F  F  B ...                F of the version made
//   down            g2 g1 g0
//   host                  step 2  step 1  step 0
//   up                            w2      w1      w0
struct HostCosts {
  double down = 0;  // bytes per second; 0 or infinite: bytes take no time
  double up = 0;
  // Of equal size, that a stage's gradients, step and weights are cut into. The batch's last
  // backward makes one after the other, so with one bucket nothing goes down before its end.
  int buckets = 1;
  // A batch's gradients are added up where those of the batch before were: its first backward waits
  // until these have gone down.
  bool one_buffer = false;
};

struct Costs {
  std::vector<StageCosts> stages;  // one per stage of the model; its copies cost the same
  std::vector<EdgeCosts> edges;    // one fewer than stages; empty: free
  std::vector<SkipCosts> skips;    // no two stages twice
  // A stage's gradient_bytes go down, `update` is the time of its step on the host, and its
  // weight_bytes come up. None: every step is on its stage's device.
  std::optional<HostCosts> host = std::nullopt;
};

// The copies of a stage cost the same.
inline const StageCosts& cost_of(const Schedule& schedule, const Costs& costs, int stage) {
  return costs.stages[stage % schedule.depth()];
}

struct SimulatedAction {
  int stage = 0;
  ActionKind kind = ActionKind::kForward;
  int batch = 0;
  int microbatch = 0;  // of the batch; of an update its last
  int version = 0;     // weights read, or made by an update
  double start = 0;    // seconds from the run's start
  double end = 0;
};

struct Simulation {
  std::vector<std::vector<SimulatedAction>> timeline;  // per rank, in order
  double makespan = 0;                                 // end of the last action
  // Seconds per batch in the steady state at the slowest rank: the time between the ends of a
  // rank's last actions of two batches, divided by the number of batches between them. The later
  // one is the last whose actions all come before the drain, the earlier one is half as far from
  // the start. If the run is too short for them to be clear of filling and far apart, a longer one
  // is measured, so the period does not depend on num_batches (to about one percent where hops
  // are exposed).
  double period = 0;
  // Per rank: share of the period in which it does no action; updates beside others don't count.
  std::vector<double> bubbles;
  std::vector<int> most_in_flight;  // per stage: microbatches between F and the end of B or W
  std::vector<double> peak_bytes;   // per rank: the largest of memory_over_time()
};

// Runs batches 0 .. num_batches - 1 and a drain. Every rank executes its unrolled lists strictly in
// order. An action begins when its rank is free and its message has arrived: F of stage s needs
// that of F of stage s - 1, B and I of stage s need that of B or I of stage s + 1, of the same
// pipeline. U of a stage with two copies begins when both have come to it. U of a stage that keeps
// several versions goes on beside the rank's next actions, but for the first F that reads what it
// makes and the stage's next U; other Us occupy their rank. Messages of one edge or skip
// and direction occupy the link one after another, each for message_bytes / bandwidth seconds, and
// arrive latency seconds later. Takes time linear in the number of actions.
//
// With costs.host every U goes on beside its rank's actions, also where a stage keeps one version.
// It begins when its stage's U before has stepped, and its end is that of the last copy up. Each of
// a rank's copy engines, and its host, takes the buckets in the order of the rank's Us:
//
//   down   not before the last backward of the batch has made the bucket (it makes them at an even
//          pace), or, if all_reduce or a copy of the stage adds to it, before the sum has come to
//          it; nor before the stage's U before has stepped
//   step   when the bucket's gradients are on the host and the weights of the step before have left
//   up     when all gradients of the stage are down: weights may take their place
//
// The schedule must be legal, see validate(): only its rules 1 to 3 are checked here, and that
// costs of stages, edges and the host are finite and >= 0; not that there are as many as the
// schedule has stages, nor skips. Throws ScheduleError or ValueError for these, and Deadlock if
// ranks wait for each other: the text says what each one waits for.
Simulation simulate(const Schedule& schedule, const Costs& costs, int num_batches);

// About the period of a schedule that flushes, from its second batch alone and without checking
// anything, as simulate() would: where very many are compared.
double second_batch(const Schedule& schedule, const Costs& costs);

struct MemoryStep {
  double time = 0;   // from here on
  double bytes = 0;  // this much is held
};

// The memory of a rank: all weight versions, gradients and optimizer state of its stages, and the
// activations of the microbatches in flight.
std::vector<MemoryStep> memory_over_time(const Schedule& schedule, const Costs& costs,
                                         const std::vector<SimulatedAction>& actions, int rank);

}  // namespace pd2
