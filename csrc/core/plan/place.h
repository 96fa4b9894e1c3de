// Puts chosen stages on devices: their messages and all-reduces take the links between these.

#pragma once

#include "core/plan/links.h"
#include "core/plan/stages.h"

#include <vector>

namespace pd2 {

// An evaluated candidate: its stages, its devices, its time, its score.
struct Evaluation {
  Candidate candidate;
  std::vector<PlannedStage> stages;
  Costs costs;  // as simulated
  DeviceGrid devices{1, 1};
  StepTime time;
  double score = 0;       // what is minimised, of one row
  double peak_bytes = 0;  // of the fullest rank
};

// Slowness and memory of the devices that hold a candidate's stages.
StageHolders holders_of(const Cluster& cluster, const PipelineShape& shape,
                        const DeviceGrid& devices);

// The candidate's stages on the devices of the links. Time and score are not set.
Evaluation placed(const Candidate& candidate, ChosenStages stages, GridLinks& links);

// Puts the plan on other devices, the best by period_by_formula(), if that takes less time in the
// end.
void search_devices(const Cluster& cluster, Evaluation& plan);

}  // namespace pd2
