#include "planner/plan/stages.h"

#include "core/infinity.h"
#include "planner/partition/folded_split.h"

#include <algorithm>
#include <array>
#include <span>
#include <utility>

namespace pd2 {
namespace {

constexpr int kMostSplitsForMessages =
    3;  // to find a split that leaves its own messages their memory
// A rank's stages may differ in what they take, as long as it fits together.
constexpr std::array kShares = {1.7, 1.4, 1.2, 1.1, 1.0};

}  // namespace

StageChooser::StageChooser(const PlanProblem& problem, const DeviceMappings& mappings)
    : problem_(problem), mappings_(mappings), positions_({0}) {
  const int n = problem.model.num_layers();
  for (int layer = 1; layer <= n; ++layer) {
    if (layer == n || problem.model.may_cut(layer - 1)) positions_.push_back(layer);
  }
  for (int size = 0; size < static_cast<int>(problem.model.microbatches.size()); ++size) {
    sums_.push_back(sums_of(problem.model, size));
    const auto bytes = cut_bytes(problem.model.microbatches[size].edges, n);
    double& largest = largest_messages_.emplace_back(0);
    for (std::size_t i = 1; i + 1 < positions_.size(); ++i) {
      largest = std::max(largest, static_cast<double>(bytes[positions_[i] - 1]));
    }
  }
}

// Takes the mean over the links between neighbouring ranks in all mappings, so that one split does
// for all; of a matrix over those of any two devices, so that it does not depend on their numbers.
void StageChooser::set_mean_message(StageDraft& draft) {
  const int ranks = draft.shape.ranks;
  const int width = draft.candidate.width;
  const auto [place, is_new] = mean_messages_.try_emplace({ranks, width});
  auto& [per_byte, per_value] = place->second;
  if (const auto* matrix = std::get_if<LinkMatrix>(&problem_.cluster.topology)) {
    const int n = ranks > 1 && is_new ? matrix->num_devices : 0;
    for (int a = 0; a < n; ++a) {
      for (int b = 0; b < a; ++b) {
        const Link link = link_between(problem_.cluster.topology, a, b);
        per_byte += 2 / (double(n) * (n - 1) * link.bandwidth);
        per_value += 2 * link.latency / (double(n) * (n - 1));
      }
    }
    draft.seconds_per_byte = per_byte;
    draft.seconds_per_value = per_value;
    return;
  }
  for (int mapping = 0; mapping < mappings_.count() && ranks > 1 && is_new; ++mapping) {
    const DeviceGrid devices = mappings_.grid(mapping, ranks, width);
    const double share = 1.0 / (double(mappings_.count()) * width * (ranks - 1));
    for (int rank = 1; rank < ranks; ++rank) {
      for (int replica = 0; replica < width; ++replica) {
        const Link link = link_between(problem_.cluster.topology, devices.at(rank - 1, replica),
                                       devices.at(rank, replica));
        per_byte += share / link.bandwidth;
        per_value += share * link.latency;
      }
    }
  }
  draft.seconds_per_byte = per_byte;
  draft.seconds_per_value = per_value;
}

StageChooser::SplitKey StageChooser::split_key(const StageDraft& draft) {
  return {draft.candidate.size,   draft.shape.depth(),     draft.recomputes_stages(),
          draft.seconds_per_byte, draft.seconds_per_value, draft.holders.slowness};
}

const std::vector<int>& StageChooser::balanced_split(const StageDraft& draft) {
  const auto [place, is_new] = balanced_.try_emplace(split_key(draft));
  if (is_new) {
    std::vector<StageMemoryRule> rules;
    for (const double slowness : draft.holders.slowness) rules.push_back({.slowness = slowness});
    place->second = split_stages(draft.split_problem(std::move(rules)))->first_layers;
  }
  return place->second;
}

// Each of a rank's several stages keeps to so many equal shares of its memory: of what runs again
// too, or of `sharing_again` stages that share its memory all of it.
std::optional<std::vector<int>> StageChooser::fitting_split(const StageDraft& draft,
                                                            int sharing_again,
                                                            double shares) const {
  std::vector<StageMemoryRule> rules = draft.memory_rules();
  for (StageMemoryRule& rule : rules) {
    rule.limit *= shares;
    if (rule.inputs > 0) rule.activations /= sharing_again;
  }
  if (!draft.may_fit(rules, 1, kInfinity)) return std::nullopt;
  std::optional<StageSplit> found = split_stages(draft.split_problem(std::move(rules)));
  if (!found) return std::nullopt;
  return std::move(found->first_layers);
}

std::vector<ChosenStages> StageChooser::choose_splits(StageDraft& draft, double seconds) {
  std::vector<ChosenStages> found;
  if (!draft.may_fit(draft.memory_rules(), draft.shape.stages_sharing_a_rank(), seconds)) {
    return found;
  }
  set_mean_message(draft);
  const auto add = [&](const std::optional<std::vector<int>>& firsts) {
    if (!firsts) return false;
    draft.set_stages(*firsts);
    if (draft.set_memory()) found.push_back(draft.chosen);
    return true;
  };
  // A split is made before its messages are known. If they leave it too little memory, another one
  // is made for what they leave.
  const int tries = problem_.options.microbatches_behind > 0 ? kMostSplitsForMessages : 1;
  const auto add_fitting = [&](auto&& split) {
    const std::size_t before = found.size();
    draft.chosen.stages.clear();
    for (int i = 0; i < tries && found.size() == before; ++i) {
      if (!add(split())) return;
    }
  };
  // Where there are many pieces a folded split is as even, and found sooner.
  const bool may_search = !draft.shape.is_folded() || num_pieces() <= kMostPiecesForRanks;
  if (may_search) {
    // Where memory was too small for the last candidate, it probably is for this one, too. With one
    // stage a rank the fitting split is the balanced one, if that fits: only time would be lost.
    const bool may_skip = draft.shape.stages_sharing_a_rank() == 1;
    bool& is_tight = is_memory_tight_[draft.recomputes_stages()];
    if (!may_skip || !is_tight || balanced_.contains(split_key(draft))) {
      add(balanced_split(draft));
      if (may_skip) is_tight = found.empty();
    }
    const bool is_one_at_a_time = draft.recomputes_stages() && !draft.shape.recomputes_together();
    const int sharing = is_one_at_a_time ? draft.shape.stages_sharing_a_rank() : 1;
    const bool is_alone = draft.shape.stages_sharing_a_rank() == 1;
    for (const double share : std::span(kShares).last(is_alone ? 1 : kShares.size())) {
      for (const int stages : {sharing, 1}) {
        if (found.empty()) add_fitting([&] { return fitting_split(draft, stages, share); });
      }
    }
  }
  const double message = largest_message(draft.candidate) * draft.seconds_per_byte;
  if (may_search && !found.empty() &&
      is_message_exposed(draft.candidate, message + draft.seconds_per_value)) {
    StageDraft with_free_messages = draft;
    with_free_messages.seconds_per_byte = with_free_messages.seconds_per_value = 0;
    const std::vector<int>& firsts = balanced_split(with_free_messages);
    const bool is_other = firsts != first_layers(found[0].stages);
    const std::size_t before = found.size();
    if (is_other) add(firsts);
    found.back().is_fastest = !is_other || found.size() > before;
  }
  if (draft.shape.is_folded()) {
    add_fitting([&] {  // where a rank's stages share its memory as they need it
      std::vector<StageMemoryRule> rules = draft.memory_rules();
      for (StageMemoryRule& rule : rules) rule.limit *= draft.shape.stages_sharing_a_rank();
      return split_folded(draft.split_problem(std::move(rules)));
    });
  }
  return found;
}

bool StageChooser::choose_split_for_blocks(StageDraft& draft, double seconds) {
  if (!draft.may_fit(draft.memory_rules(), draft.shape.stages_sharing_a_rank(), seconds)) {
    return false;
  }
  set_mean_message(draft);
  draft.set_stages(balanced_split(draft));
  if (draft.set_memory()) {
    const std::vector<Recompute>& ways = problem_.options.recompute;
    return std::ranges::find(ways, Recompute::kNone) == ways.end();
  }
  return draft.recompute_blocks() && draft.set_memory();
}

// Reuses what it chose last for other mappings of the same candidate, if all devices are alike. A
// candidate that did not fit the time does not fit less time either.
std::vector<ChosenStages> StageChooser::choose(const Candidate& candidate,
                                               const StageHolders& holders, double seconds) {
  const bool are_alike = problem_.cluster.types.size() == 1;
  if (are_alike && last_ && same_but_mapping(last_->candidate, candidate) &&
      (!last_->chosen.empty() || seconds <= last_->seconds)) {
    return last_->chosen;
  }
  StageDraft draft = {problem_, candidate, sums_[candidate.size], holders};
  last_ = {candidate, seconds, {}};
  if (candidate.recompute != Recompute::kBlocks) {
    last_->chosen = choose_splits(draft, seconds);
  } else if (choose_split_for_blocks(draft, seconds)) {
    last_->chosen.push_back(std::move(draft.chosen));
  }
  return last_->chosen;
}

bool StageChooser::is_message_exposed(const Candidate& candidate, double seconds) const {
  const LayerCost& all = sums_[candidate.size].of_all();
  const double work = all.forward + all.input_grad + all.weight_grad;
  return seconds >
         kFreeMessage * problem_.cluster.least_slowness() * work / candidate.shape.depth();
}

std::optional<ChosenStages> StageChooser::stages_of(const Candidate& candidate,
                                                    const StageHolders& holders,
                                                    const std::vector<int>& firsts) const {
  StageDraft draft = {problem_, candidate, sums_[candidate.size], holders};
  draft.set_stages(firsts);
  if (!draft.set_memory()) return std::nullopt;
  return std::move(draft.chosen);
}

}  // namespace pd2
