// Layers -> stages with different numbers of replicas (PipeDream, SOSP'19, section 3.1).

#pragma once

#include "core/partition/stage_split.h"

#include <limits>
#include <optional>
#include <vector>

namespace pd2 {

struct ReplicationProblem {
  std::vector<LayerCost> layers;
  std::vector<Edge> edges;
  std::vector<Value> values;
  std::vector<bool> can_cut;
  int num_machines = 1;
  int num_microbatches = 1;     // of a batch; a stage's replicas share them
  double seconds_per_byte = 0;  // of messages, as in StageSplitProblem
  double seconds_per_value = 0;
  bool recompute = false;
  // The replicas' all-reduce of a stage's trained bytes, once a batch: as a ring, of
  // 2 (w - 1) / w * bytes and 2 (w - 1) steps.
  double all_reduce_seconds_per_byte = 0;
  double all_reduce_seconds_per_step = 0;
  double trained = 0;  // times trained_bytes: versions, gradient, optimizer state
  double frozen = 1;
  double limit = std::numeric_limits<double>::infinity();  // bytes of a machine
};

struct ReplicatedSplit {
  std::vector<int> first_layers;
  std::vector<int> replicas;  // machines of each stage
  double slowest = 0;         // seconds per microbatch of the slowest stage
};

// The split and replication over at most num_machines machines, any number of stages, whose slowest
// stage takes the least time. A stage of w replicas takes per microbatch
//     T(w) = max((F [twice with recompute] + B + messages) / w, all-reduce / num_microbatches):
// microbatches go to the replicas in turn, and the all-reduce of a batch is beside the next batch's
// work. On M machines from this stage on (its own included), each of its replicas keeps
// min(ceil(M / w), ceil(num_microbatches / w)) microbatches: all activations of these, or with
// recompute their inputs and the activations of one.
//
// PipeDream's A(j, M) = min over k, w of max(A(k, M - w), T(k + 1 .. j, w)), from the back, as the
// microbatches in flight depend on the machines that follow. Exact but for rounding; of equals the
// one with the fewest machines. Time O(n^2 M^2). nullopt: nothing fits the memory. Throws
// ValueError as split_stages(), and for num_machines or num_microbatches < 1.
std::optional<ReplicatedSplit> split_replicated(const ReplicationProblem& problem);

}  // namespace pd2
