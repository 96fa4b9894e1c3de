// A problem for the planner: a profiled model, a cluster, and what the caller wants.

#pragma once

#include "planner/partition/stage_split.h"
#include "planner/plan/cluster.h"
#include "planner/plan/period.h"

#include <string>
#include <vector>

namespace pd2 {

inline constexpr double kBytesPerGiB = 1024.0 * 1024 * 1024;

// Costs of all layers for one size of microbatch, on the profiled device.
struct ProfiledRows {
  int rows = 0;
  std::vector<LayerCost> layers;
  std::vector<Edge> edges;
  std::vector<Value> shared;  // tensors kept and parameters used by several layers, in order
};

// Layers first .. end - 1 are one module, which can be recomputed by itself.
struct Block {
  int first = 0;
  int end = 0;
};

struct ProfiledModel {
  std::vector<ProfiledRows> microbatches;  // by rising rows
  std::vector<bool> can_cut;               // layers - 1; empty: everywhere
  std::vector<Block> blocks;               // in order, none overlaps another
  double seconds_per_update_byte = 0;      // of trained bytes
  double seconds_per_action = 0;           // on top of every F, B, I and W of a stage

  int num_layers() const { return static_cast<int>(microbatches.front().layers.size()); }
  bool may_cut(int after) const { return can_cut.empty() || can_cut[after]; }
};

enum class Recompute { kNone, kStages, kBlocks };
inline const char* to_string(Recompute recompute) {
  constexpr const char* kNames[] = {"none", "stages", "blocks"};
  return kNames[static_cast<int>(recompute)];
}

enum class Objective { kThroughput, kCost, kMemory };
inline const char* to_string(Objective objective) {
  constexpr const char* kNames[] = {"throughput", "cost", "memory"};
  return kNames[static_cast<int>(objective)];
}

struct PlanOptions {
  int batch = 1;          // rows of all replicas, at least
  int largest_batch = 1;  // at most
  int width = 0;          // of every candidate; 0: any
  int num_stages = 0;     // of every candidate; 0: any
  std::vector<std::string> schedules;
  std::vector<int> stages_per_rank = {2};  // tried where a schedule has chunks
  std::vector<Recompute> recompute = {Recompute::kNone, Recompute::kStages, Recompute::kBlocks};
  Objective objective = Objective::kThroughput;
  double slack = 0.1;       // kMemory: of the least time
  double num_batches = 0;   // kCost: to be trained, for prices that change; 0: at today's
  double start_within = 0;  // hours: kCost: how long num_batches may wait for low prices
  // Bytes per byte of trained parameters, in one copy.
  double gradient = 1;
  double state = 0;  // optimizer and masters
  double kept = 0;   // what a correction of late steps keeps; nothing where no forward is late
  // Each of w replicas has 1/w of the state, steps that, and gives the others its weights.
  bool shares_state = false;
  double held_state(int width, double mean_delay) const {
    return (state + (mean_delay > 0 ? kept : 0)) / (shares_state ? width : 1);
  }
  double stepped(int width) const { return shares_state ? 1.0 / width : 1; }
  // What replicas exchange in an update, as bytes of a sum that all get: half of them go to whoever
  // adds up, the other half back.
  double summed() const { return shares_state ? (gradient + 1) / 2 : gradient; }
  // Optimizers step in the host's memory: their times are of a rank's host, not of its device.
  bool steps_on_host = false;
  // Microbatches that a device may be behind its host: their messages' memory is not free yet.
  int microbatches_behind = 0;
  bool unequal_replicas = false;  // replicas may have different numbers of microbatches
  double max_late_share = 1;      // of schedules of which some forwards alone are late
  int num_alternatives = 5;
  double reserved = 0;  // bytes of each device that are no part of its type's memory; for errors
};

// Checked in pipedream2bw/planner, by the dataclasses of profiles and clusters and by plan().
struct PlanProblem {
  ProfiledModel model;
  Cluster cluster;
  PlanOptions options;
};

}  // namespace pd2
