// A candidate's stages: which layers, what they hold, and whether that fits.

#pragma once

#include "core/plan/candidates.h"
#include "core/plan/fit.h"
#include "core/plan/sums.h"

#include <array>
#include <map>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace pd2 {

struct PlannedStage {
  int first = 0;  // layers
  int end = 0;
  std::vector<int> devices;  // by replica
  StageCosts costs;          // on the slowest of them
  // Of the values that it sends, the slowest message: seconds, and the stage it goes to, the next
  // one unless values pass over that.
  double message = 0;
  int receiver = 0;
  double frozen_bytes = 0;
  int most_in_flight = 0;
  double peak_bytes = 0;
  double memory_limit = 0;  // of the smallest device, of all its stages
  std::vector<int> blocks;  // that are recomputed
};

std::vector<int> first_layers(const std::vector<PlannedStage>& stages);

// The devices of a candidate's ranks, as far as its stages depend on them.
struct StageHolders {
  std::vector<double> slowness;  // by stage: of the slowest one
  std::vector<double> limits;    // by rank: bytes of the smallest one
};

struct ChosenStages {
  std::vector<PlannedStage> stages;  // devices and what depends on links are not set
  std::vector<EdgeCosts> edges;      // message_bytes alone are set; 0: no message
  std::vector<SkipCosts> skips;      // likewise
  double peak_bytes = 0;             // of the fullest rank
  bool is_fastest = false;           // no split has less work on its slowest stage
};

inline constexpr int kMostPiecesForRanks = 256;
inline constexpr double kUnevenRanks = 1.01;
inline constexpr double kFreeMessage = 0.01;

// Chooses the stages of candidates of one problem, which must outlive it.
//
//   split    of all splits the one whose slowest stage, messages included, takes the least time
//            (core/partition/stage_split.h; a message at the mean of the links between neighbouring
//            ranks, on a measured matrix of all links, as any two may become neighbours). Beside
//            it, if messages may not be as good as free, the one that is best if they are: 2bw may
//            hide them. If a rank's stages need more than its memory: the best split of which every
//            stage keeps to an equal share of its rank's memory, if it can of that which what runs
//            again leaves. Where ranks have several stages, beside it the one that makes the
//            slowest rank fast (core/partition/interleaved_split.h), if the model can be cut into
//            kMostPiecesForRanks pieces at most, as it takes milliseconds, and if the slowest rank
//            of the first one takes kUnevenRanks times the mean or more. Of two pipelines beside
//            it, above so many pieces instead, the folded one (core/partition/folded_split.h).
//   blocks   to make the first of these fit, on each rank blocks are recomputed that take the least
//            time (plan_blocks.h). A split that fits without is kNone's alone.
class StageChooser {
 public:
  StageChooser(const PlanProblem& problem, const Layouts& layouts);

  // Up to three, of which the time decides. None if nothing fits, or if it can be seen that a batch
  // takes `seconds` at least.
  std::vector<ChosenStages> choose(const Candidate& candidate, const StageHolders& holders,
                                   double seconds);

  // The stages of a given split, if they fit. Of a candidate that recomputes no blocks.
  std::optional<ChosenStages> stages_of(const Candidate& candidate, const StageHolders& holders,
                                        const std::vector<int>& firsts) const;

  // Splits that suit these links between neighbouring stages (core/partition/boundary_split.h).
  // Values that layers far away read count for none of them. At most kMostPiecesForRanks pieces.
  std::vector<std::vector<int>> splits_for(const Candidate& candidate, const StageHolders& holders,
                                           const std::vector<EdgeCosts>& edges) const;

  // Whether so many seconds of a message are more than kFreeMessage of the mean stage's work.
  bool is_message_exposed(const Candidate& candidate, double seconds) const;

  // Bytes of the largest message that one stage can send to the next one.
  double largest_message(const Candidate& candidate) const {
    return largest_messages_[candidate.size];
  }

  // Where the model can be cut: the layers that stages may begin at, and the number of layers.
  const std::vector<int>& positions() const { return positions_; }
  int num_pieces() const { return static_cast<int>(positions_.size()) - 1; }

  // Bytes that each device would need at least for the candidate, blocks apart.
  double least_memory(const Candidate& candidate, const StageHolders& holders) const;

 private:
  struct Plan;  // a candidate that stages are being chosen for
  struct Last {
    Candidate candidate;
    double seconds;
    std::vector<ChosenStages> chosen;
  };
  using SplitKey = std::tuple<int, int, bool, double, double, std::vector<double>>;

  Plan begin(const Candidate& candidate, const StageHolders& holders) const;
  void set_mean_message(Plan& plan);
  StageSplitProblem split_problem(const Plan& plan) const;
  StageSplitProblem split_problem_of_ranks(const Plan& plan) const;
  std::vector<StageMemoryRule> memory_rules(const Plan& plan) const;
  bool may_fit(const Plan& plan, const std::vector<StageMemoryRule>& rules, int sharing,
               double seconds) const;
  static SplitKey split_key(const Plan& plan);
  const std::vector<int>& balanced_split(const Plan& plan);
  std::vector<int> split_with_free_messages(Plan plan);
  std::optional<std::vector<int>> fitting_split(const Plan& plan, int sharing_again) const;
  std::optional<std::vector<int>> folded_split(const Plan& plan) const;
  std::optional<std::vector<int>> split_of_ranks(const Plan& plan) const;
  bool may_balance_ranks(const Plan& plan, const std::vector<ChosenStages>& found) const;
  std::vector<ChosenStages> choose_splits(Plan& plan, double seconds);
  bool choose_split_for_blocks(Plan& plan, double seconds);
  void set_stages(Plan& plan, const std::vector<int>& firsts) const;
  bool set_memory(Plan& plan) const;
  bool recompute_blocks(Plan& plan) const;
  void recompute_block(Plan& plan, int stage, int block) const;

  const PlanProblem& problem_;
  const Layouts& layouts_;
  double least_slowness_;
  std::vector<int> positions_;
  std::vector<double> largest_messages_;  // by size
  std::vector<LayerSums> sums_;           // by size
  std::optional<Last> last_;              // that stages were chosen for
  std::map<std::pair<int, int>, std::pair<double, double>> mean_messages_;  // by ranks, width
  std::map<SplitKey, std::vector<int>> balanced_;
  std::array<bool, 2> is_memory_tight_ = {};  // with and without recompute of stages
};

}  // namespace pd2
