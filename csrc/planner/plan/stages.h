// Chooses a candidate's stages: which layers they have, so that they fit the memory.

#pragma once

#include "planner/plan/draft.h"

#include <array>
#include <map>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace pd2 {

inline constexpr int kMostPiecesForRanks = 256;
inline constexpr double kFreeMessage = 0.01;

// Chooses the stages of candidates of one problem, which must outlive it.
//
//   split    of all splits the one whose slowest stage, messages included, takes the least time
//            (planner/partition/stage_split.h; a message at the mean of the links between
//            neighbouring ranks, on a measured matrix of all links, as any two may become
//            neighbours). Beside it, if messages may not be as good as free, the one that is best
//            if they are: 2bw may hide them. If a rank's stages need more than its memory: the best
//            split of which every stage keeps to some equal shares of its rank's memory, if it can
//            of that which what runs again leaves. Of two pipelines and in a V beside it, above
//            kMostPiecesForRanks pieces instead, the folded one (planner/partition/folded_split.h).
//   blocks   to make the first of these fit, on each rank blocks are recomputed that take the least
//            time (planner/plan/blocks.h). A split that fits without is kNone's alone.
class StageChooser {
 public:
  StageChooser(const PlanProblem& problem, const DeviceMappings& mappings);

  // Up to three, of which the time decides. None if nothing fits, or if it can be seen that a batch
  // takes `seconds` at least.
  std::vector<ChosenStages> choose(const Candidate& candidate, const StageHolders& holders,
                                   double seconds);

  // The stages of a given split, if they fit. Of a candidate that recomputes no blocks.
  std::optional<ChosenStages> stages_of(const Candidate& candidate, const StageHolders& holders,
                                        const std::vector<int>& firsts) const;

  // Whether a message that takes this long takes more than kFreeMessage of the mean stage's work.
  bool is_message_exposed(const Candidate& candidate, double seconds) const;

  // Bytes of the largest message that one stage can send to the next one.
  double largest_message(const Candidate& candidate) const {
    return largest_messages_[candidate.size];
  }

  // The layers that stages may begin at, and the number of layers.
  const std::vector<int>& positions() const { return positions_; }
  int num_pieces() const { return static_cast<int>(positions_.size()) - 1; }

 private:
  struct Last {
    Candidate candidate;
    double seconds;
    std::vector<ChosenStages> chosen;
  };
  using SplitKey = std::tuple<int, int, bool, double, double, std::vector<double>>;

  void set_mean_message(StageDraft& draft);
  static SplitKey split_key(const StageDraft& draft);
  const std::vector<int>& balanced_split(const StageDraft& draft);
  std::optional<std::vector<int>> fitting_split(const StageDraft& draft, int sharing_again,
                                                double shares) const;
  std::vector<ChosenStages> choose_splits(StageDraft& draft, double seconds);
  bool choose_split_for_blocks(StageDraft& draft, double seconds);

  const PlanProblem& problem_;
  const DeviceMappings& mappings_;
  std::vector<int> positions_;
  std::vector<double> largest_messages_;  // by size
  std::vector<LayerSums> sums_;           // by size
  std::optional<Last> last_;              // that stages were chosen for
  std::map<std::pair<int, int>, std::pair<double, double>> mean_messages_;  // by ranks, width
  std::map<SplitKey, std::vector<int>> balanced_;
  std::array<bool, 2> is_memory_tight_ = {};  // with and without recompute of stages
};

}  // namespace pd2
