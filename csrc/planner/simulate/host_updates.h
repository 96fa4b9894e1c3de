// When steps in the host's memory are over, and the copies to it and back.

#pragma once

#include "planner/simulate/simulate.h"

#include <vector>

namespace pd2 {

// The copy engines and the hosts of a run's ranks, by simulate()'s rules for costs.host. What it is
// told of a rank's stages comes in the order of the rank's list; without costs.host it is told
// nothing.
class HostUpdates {
 public:
  HostUpdates(const Schedule& schedule, const Costs& costs);

  // The stage's last backward of a batch, or its W, made the gradients between these times.
  void complete(int stage, double start, double end) { stages_[stage].made = {start, end}; }
  // The U of that batch begins. Gives the time at which the last weights have come up.
  double update(int stage, double begins);

  // By the stage's newest U: its gradients are down, and its last bucket has been stepped.
  double gone(int stage) const { return stages_[stage].gone; }
  double stepped(int stage) const { return stages_[stage].stepped; }

 private:
  struct Interval {
    double start = 0;
    double end = 0;
  };
  struct Stage {
    Interval made;
    double gone = 0;
    double stepped = 0;
    std::vector<double> left;  // by bucket: when its newest weights have come up
  };
  struct Rank {  // until when each of them is busy
    double down = 0;
    double host = 0;
    double up = 0;
  };

  const Schedule& schedule_;
  const Costs& costs_;
  std::vector<Stage> stages_;
  std::vector<Rank> ranks_;
};

// Throws ValueError for figures that no host has.
void check_host(const HostCosts& host);

}  // namespace pd2
