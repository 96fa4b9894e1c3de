// Looks for better cuts of a candidate whose devices, and so whose links, are known.

#pragma once

#include "core/plan/place.h"

#include <functional>
#include <vector>

namespace pd2 {

// Where messages count tries splits that suit the links between the plan's devices, the best of
// them with devices of its own; then moves cuts of the best few plans as long as that saves time.
class Refiner {
 public:
  // Both must outlive it.
  Refiner(const PlanProblem& problem, const StageChooser& chooser)
      : problem_(problem), chooser_(chooser) {}

  // Whether other cuts may be better than the placed plan's: no blocks are recomputed, the model
  // has kMostPiecesForRanks pieces at most, and messages or the sum over replicas may take more
  // than kFreeMessage of the mean stage's work, or a batch that is flushed is short and simulated
  // soon.
  bool may_refine(const Evaluation& plan, GridLinks& links) const;

  // Replaces placed plans of one candidate by the best that are found.
  void refine(std::vector<Evaluation>& plans, const StageHolders& holders) const;

 private:
  bool has_exposed_message(const Evaluation& plan, GridLinks& links) const;
  void move_cuts(Evaluation& plan, const StageHolders& holders, int num_tries,
                 const std::function<double(const Evaluation&)>& seconds) const;

  const PlanProblem& problem_;
  const StageChooser& chooser_;
};

}  // namespace pd2
