// A candidate whose stages are being chosen: what they take and hold with given cuts.

#pragma once

#include "planner/plan/candidates.h"
#include "planner/plan/sums.h"

#include <vector>

namespace pd2 {

struct PlannedStage {
  int first = 0;  // layers
  int end = 0;
  std::vector<int> devices;  // by replica
  StageCosts costs;          // with the holders' slowness
  // The slowest message that it sends: seconds, and the stage it goes to (the next one unless
  // values pass over that).
  double message = 0;
  int receiver = 0;
  double frozen_bytes = 0;
  double message_bytes = 0;  // that it has received, of microbatches that its device is behind
  double summed_bytes = 0;   // by replicas, see PlanOptions
  int num_versions = 1;
  int most_in_flight = 0;
  double peak_bytes = 0;
  double memory_limit = 0;  // of the smallest device, of all its stages
  std::vector<int> blocks;  // that are recomputed
};

std::vector<int> first_layers(const std::vector<PlannedStage>& stages);

// The devices of a candidate's ranks, as far as its stages depend on them.
struct StageHolders {
  std::vector<double> slowness;  // by stage: see slowness_of_rank()
  std::vector<double> limits;    // by rank: bytes of the smallest one
};

struct ChosenStages {
  std::vector<PlannedStage> stages;  // devices and what depends on links are not set
  Costs costs;                       // of links message_bytes alone are set; 0: no message
  double peak_bytes = 0;             // of the fullest rank
  bool is_fastest = false;           // no split has less work on its slowest stage
};

// A sum of many terms, in another order than the limit's.
inline bool is_within(double bytes, double limit) { return bytes <= limit * (1 + 1e-9); }

// All that it is made of must outlive it.
struct StageDraft {
  const PlanProblem& problem;
  const Candidate& candidate;
  const LayerSums& sums;
  const StageHolders& holders;
  const PipelineShape& shape = candidate.shape;
  const ProfiledRows& profiled = problem.model.microbatches[candidate.size];
  ChosenStages chosen = {};
  double seconds_per_byte = 0;  // of a mean message
  double seconds_per_value = 0;

  double held_state() const {
    return problem.options.held_state(candidate.width, shape.mean_delay());
  }
  bool recomputes_stages() const { return candidate.recompute == Recompute::kStages; }

  // Each of a rank's stages with an equal share of its memory: of what the messages of the stages
  // leave that are set, if any are.
  std::vector<StageMemoryRule> memory_rules() const;
  StageSplitProblem split_problem(std::vector<StageMemoryRule> rules) const;

  // False: every split of the candidate breaks a limit or takes `seconds` a batch or more. The
  // furthest that stages reach, each one filled with `sharing` times its rule's memory and with as
  // much work as leaves the batch below `seconds`, must be the last layer. Far cheaper than a
  // split. Where batches drain, what comes before a stage on a microbatch's way there and back
  // leaves it less time.
  bool may_fit(const std::vector<StageMemoryRule>& rules, int sharing, double seconds) const;

  // To be called in this order. set_stages() sets `chosen` to the stages of the cuts;
  // recompute_blocks() chooses blocks on every rank that needs it and returns whether they are
  // enough; set_memory() sets the peaks and returns whether every rank is within its limit.
  void set_stages(const std::vector<int>& firsts);
  bool recompute_blocks();
  bool set_memory();

 private:
  double least_seconds(const LayerCost& before, const LayerCost& stage, double slowness) const;
  bool may_fit_together(const std::vector<StageMemoryRule>& rules) const;
  int furthest_end(const StageMemoryRule& rule, int first, int sharing, double seconds) const;
  void recompute_block(int stage, int block);
};

}  // namespace pd2
