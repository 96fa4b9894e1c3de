// Puts chosen stages on devices: their messages and all-reduces take the links between these.

#pragma once

#include "planner/plan/device_mapping.h"
#include "planner/plan/stages.h"

#include <map>
#include <utility>
#include <vector>

namespace pd2 {

// An evaluated candidate: its stages, its devices, its time, its score.
struct Evaluation : ChosenStages {
  Candidate candidate;
  DeviceGrid devices = {1, 1};
  StepTime time = {};
  double score = 0;  // what is minimised, of one row
};

// The links that the messages and sums of a pipeline take, on given devices. They are looked up
// when first asked for: of many replicas all pairs of devices must be looked at, and a plan's cuts
// are moved many times on the same devices.
class GridLinks {
 public:
  // All must outlive it.
  GridLinks(const Cluster& cluster, const PipelineShape& shape, const DeviceGrid& devices)
      : cluster_(cluster), shape_(shape), devices_(devices), copies_(shape.depth()) {}

  const DeviceGrid& devices() const { return devices_; }

  // The slowest link over all replicas that a message of one stage to another takes; on one rank
  // none.
  Link slowest(int from, int to, double bytes);

  // Seconds in which a stage's copies add up these bytes.
  double all_reduce(int stage, double bytes);

 private:
  // A stage's devices, and the different links of the ring that they are.
  struct Copies {
    int count = 0;
    std::vector<Link> links;
  };

  std::vector<Link> links_between(int from, int to) const;

  const Cluster& cluster_;
  const PipelineShape& shape_;
  const DeviceGrid& devices_;
  std::map<std::pair<int, int>, std::vector<Link>> messages_;  // by the ranks of both stages
  std::vector<Copies> copies_;                                 // by stage
};

// Slowness and memory of the devices that hold a candidate's stages.
StageHolders holders_of(const Cluster& cluster, const Candidate& candidate,
                        const DeviceGrid& devices);

// The candidate's stages on the devices of the links. Time and score are not set.
Evaluation placed(const Candidate& candidate, ChosenStages stages, GridLinks& links);

// Puts the plan on other devices, the best by period_by_formula(), if that takes less time in the
// end.
void search_devices(const Cluster& cluster, Evaluation& plan);

}  // namespace pd2
