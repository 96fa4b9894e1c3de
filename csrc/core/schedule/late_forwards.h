// Which forwards of a batch read the older weights, where those alone do that cannot wait.

#pragma once

#include "core/schedule/global_updates.h"
#include "core/schedule/schedule.h"

#include <vector>

namespace pd2 {

// How long an update takes: from when a batch's gradients are complete on a stage, and on those
// whose updates are joint with the stage's, until forwards may read what it makes.
struct UpdateTime {
  std::vector<double> seconds;  // by stage
  std::vector<JointUpdate> joint;
  double forward = 1, backward = 2;  // seconds of a stage and a microbatch
};

// q slots, each as long as a forward and a backward. `backward`: in forwards.
UpdateTime update_of_slots(const Schedule& schedule, int slots, std::vector<JointUpdate> joint,
                           double backward = 2);

// Per stage the fewest forwards of a batch that must be late so that no stage waits for an update:
// those that begin before it has ended, when every rank goes through its list without a break.
// Under 2bw stage i has done d - 1 - i forwards of the next batch when it ends a batch's last
// backward. A joint update waits for stage 0, which ends i backwards later. For one of q slots:
//
//   s_i = d - 1 - i + q [+ ceil(i B / (F + B))]
//
// May be more than a batch has microbatches. Throws ValueError unless the delay is 1.
std::vector<int> late_forwards(const Schedule& schedule, const UpdateTime& update);

}  // namespace pd2
