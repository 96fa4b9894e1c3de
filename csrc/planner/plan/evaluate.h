// The time and the score of a candidate.

#pragma once

#include "core/infinity.h"
#include "planner/plan/place.h"

#include <functional>
#include <optional>
#include <vector>

namespace pd2 {

// When to begin, and what num_batches cost then if a row takes this long; without num_batches
// nothing.
Start start_of(const PlanProblem& problem, const DeviceGrid& devices, double seconds_per_row);

// Evaluates candidates of one problem, which must outlive it. The rules, in order:
//
//   stages   as StageChooser says; of several splits the one whose score is best
//   devices  the mapping's; with a measured matrix the best mapping by period_by_formula(), or the
//            mapping's if that takes less time in the end
//   again    cuts of the best few plans are moved as long as that saves time. Not if the time by
//            formula is twice what it must be below, or more
//   time     step_time(); of several replicas, each hop is as slow as the slowest one's, and with
//            different numbers of microbatches the one counts that takes longest. Never less than
//            Bounds::seconds()
class Evaluator {
 public:
  Evaluator(const PlanProblem& problem, const DeviceMappings& mappings);

  // None if it does not fit, or if it can be seen before its time is simulated that its score is
  // not below `worth`.
  std::optional<Evaluation> evaluate(const Candidate& candidate, double worth = kInfinity);

  // The score of a batch that takes this long on these devices: seconds per row, or price per row.
  double score(const Candidate& candidate, const DeviceGrid& devices, double seconds) const;

  const Bounds& bounds() const { return bounds_; }

 private:
  double least_seconds(const Evaluation& plan) const;

  // Whether other cuts may be better than the placed plan's: no blocks are recomputed, the model
  // has kMostPiecesForRanks pieces at most, and messages or the sum over replicas may take more
  // than kFreeMessage of the mean stage's work, or a batch that is flushed is short and simulated
  // soon, or ranks of a V wait for each other.
  bool may_refine(const Evaluation& plan, GridLinks& links) const;
  // Replaces placed plans of one candidate by the best that are found.
  void refine(std::vector<Evaluation>& plans, const StageHolders& holders) const;
  bool has_exposed_message(const Evaluation& plan, GridLinks& links) const;
  void move_cuts(Evaluation& plan, const StageHolders& holders, int num_tries,
                 const std::function<double(const Evaluation&)>& seconds) const;

  void set_time(Evaluation& plan, double least) const;  // at least `least`

  const PlanProblem& problem_;
  const DeviceMappings& mappings_;
  Bounds bounds_;
  StageChooser chooser_;
};

}  // namespace pd2
