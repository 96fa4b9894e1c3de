// The links that the messages and sums of a pipeline take, on given devices.

#pragma once

#include "core/plan/device_mapping.h"
#include "core/plan/period.h"

#include <map>
#include <utility>
#include <vector>

namespace pd2 {

// Looked up when first asked for: of many replicas all pairs of devices must be looked at, and a
// plan's cuts are moved many times on the same devices.
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

}  // namespace pd2
