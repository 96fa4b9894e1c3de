// What a candidate comes to: its stages, its devices, its time, its bytes.

#pragma once

#include "core/plan_candidates.h"

#include <limits>
#include <map>
#include <optional>
#include <tuple>
#include <vector>

namespace pd2 {

struct PlannedStage {
  int first = 0;  // layers
  int end = 0;
  std::vector<int> devices;  // by replica
  StageCosts costs;          // on the slowest of them
  double message = 0;        // seconds to the next stage
  double frozen_bytes = 0;
  int most_in_flight = 0;
  double peak_bytes = 0;
  double memory_limit = 0;  // of the smallest device, of all its stages
  std::vector<int> blocks;  // that are recomputed
};

struct Evaluation {
  Candidate candidate;
  std::vector<PlannedStage> stages;
  Costs costs;  // as simulated
  DeviceGrid devices{1, 1};
  StepTime time;
  double score = 0;       // what is minimised, of one row
  double peak_bytes = 0;  // of the fullest rank
};

// Evaluates candidates of one problem, which must outlive it. The rules, in order:
//
//   split    of all splits the one whose slowest stage, messages included, takes the least time
//            (core/stage_split.h; a message at the mean of the links between neighbouring ranks).
//            If a rank's stages need more than its memory: the best split of which every stage
//            keeps to an equal share of its rank's memory.
//   blocks   to make the first of these fit, on each rank blocks are recomputed that take the least
//            time (plan_blocks.h). A split that fits without is kNone's alone.
//   devices  the layout's; with a measured matrix the best mapping by closed_form_period(), or the
//            layout's if that takes less time in the end.
//   time     step_time(); of several replicas, each hop is as slow as the slowest one's. Never less
//            than Bounds::seconds().
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
  struct Plan;  // a candidate that is being evaluated
  struct Last {
    Candidate candidate;
    bool fits;
    double seconds;
    std::vector<PlannedStage> stages;
    std::vector<EdgeCosts> edges;
    double peak_bytes;
  };
  using SplitKey = std::tuple<int, int, bool, double, double, std::vector<double>>;

  void add_sums(const ProfiledRows& profiled);
  Plan begin(const Candidate& candidate) const;
  void set_mean_message(Plan& plan);
  StageSplitProblem split_problem(const Plan& plan) const;
  std::vector<StageMemoryRule> memory_rules(const Plan& plan) const;
  const std::vector<int>& balanced_split(const Plan& plan);
  bool may_fit(const Plan& plan, int sharing, double seconds) const;
  std::optional<std::vector<int>> fitting_split(const Plan& plan) const;
  bool may_fit_together(const Plan& plan, const std::vector<StageMemoryRule>& rules) const;
  bool choose_stages(Plan& plan, double seconds);
  bool choose_split(Plan& plan, double seconds);
  bool choose_split_for_blocks(Plan& plan, double seconds);
  void set_stages(Plan& plan, const std::vector<int>& firsts) const;
  bool set_memory(Plan& plan) const;
  bool recompute_blocks(Plan& plan) const;
  void recompute_block(Plan& plan, int stage, int block) const;
  void set_links(Plan& plan, const DeviceGrid& devices) const;
  void search_devices(Plan& plan) const;

  const PlanProblem& problem_;
  const Layouts& layouts_;
  Bounds bounds_;
  double least_slowness_ = std::numeric_limits<double>::infinity();
  std::vector<std::vector<LayerCost>> sums_;       // by size, over the layers before
  std::vector<std::vector<Edge>> edges_;           // by size, by producer and consumer
  std::vector<std::vector<LayerCost>> blocks_;     // by size: sums over a block
  std::vector<std::vector<double>> block_inputs_;  // by size: bytes that a block reads
  std::vector<double> seconds_per_saved_byte_;     // by size: of the best block
  std::optional<Last> last_;                       // that stages were chosen for
  std::vector<double> received_;                   // by size: least_received()
  std::map<std::pair<int, int>, std::pair<double, double>> mean_messages_;  // by ranks, width
  std::map<SplitKey, std::vector<int>> balanced_;
};

}  // namespace pd2
