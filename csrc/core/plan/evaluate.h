// What a candidate comes to: its stages, its devices, its time, its score.

#pragma once

#include "core/plan/links.h"
#include "core/plan/stages.h"

#include <functional>
#include <limits>
#include <optional>
#include <vector>

namespace pd2 {

struct Evaluation {
  Candidate candidate;
  std::vector<PlannedStage> stages;
  Costs costs;  // as simulated
  DeviceGrid devices{1, 1};
  StepTime time;
  double score = 0;       // what is minimised, of one row
  double peak_bytes = 0;  // of the fullest rank
};

// When to begin, and what num_batches cost then, at so many seconds a row; of no num_batches
// nothing.
Start start_of(const PlanProblem& problem, const DeviceGrid& devices, double seconds_per_row);

// Evaluates candidates of one problem, which must outlive it. The rules, in order:
//
//   stages   as StageChooser says; of several splits the one whose score is best
//   devices  the layout's; with a measured matrix the best mapping by closed_form_period(), or the
//            layout's if that takes less time in the end
//   again    if no blocks are recomputed, the model has kMostPiecesForRanks pieces at most, and
//            messages or the sum over replicas may take more than kFreeMessage of the mean stage's
//            work, or a batch that is flushed is short and simulated soon: where messages count
//            splits that suit the links between these devices, the best of them with devices of its
//            own; and from the best few on, cuts moved as long as that saves time
//            (plan_refine.cpp). Not if the time by formula is twice what it must be below, or more
//   time     step_time(); of several replicas, each hop is as slow as the slowest one's. Never less
//            than Bounds::seconds()
class Evaluator {
 public:
  Evaluator(const PlanProblem& problem, const Layouts& layouts);

  // None if it does not fit, or if it can be seen before its time is simulated that its score is
  // not below `worth`.
  std::optional<Evaluation> evaluate(const Candidate& candidate,
                                     double worth = std::numeric_limits<double>::infinity());

  // The score of so many seconds a batch on these devices: seconds per row, or price per row.
  double score(const Candidate& candidate, const DeviceGrid& devices, double seconds) const;

  const Bounds& bounds() const { return bounds_; }

  // Bytes that each device would need at least for the candidate, blocks apart.
  double least_memory(const Candidate& candidate) const;

 private:
  Evaluation placed(const Candidate& candidate, ChosenStages stages, GridLinks& links) const;
  double least_seconds(const Evaluation& plan) const;
  void set_time(Evaluation& plan, double least) const;  // no less than so many seconds
  // What may be better than these placed plans of one candidate.
  bool has_exposed_message(const Evaluation& plan, GridLinks& links) const;
  bool may_refine(const Evaluation& plan, GridLinks& links) const;
  void refine(std::vector<Evaluation>& plans, const StageHolders& holders) const;
  void move_cuts(Evaluation& plan, const StageHolders& holders, int num_tries,
                 const std::function<double(const Evaluation&)>& seconds) const;
  StageHolders holders_of(const PipelineShape& shape, const DeviceGrid& devices) const;
  void set_links(Evaluation& plan, GridLinks& links) const;
  void search_devices(Evaluation& plan) const;

  const PlanProblem& problem_;
  const Layouts& layouts_;
  Bounds bounds_;
  StageChooser chooser_;
};

}  // namespace pd2
