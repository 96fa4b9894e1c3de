#include "core/plan/stages.h"

#include "core/partition/boundary_split.h"
#include "core/partition/folded_split.h"
#include "core/partition/interleaved_split.h"
#include "core/plan/blocks.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace pd2 {

struct StageChooser::Plan {
  const Candidate& candidate;
  const ProfiledRows& profiled;
  const LayerSums& sums;
  const StageHolders& holders;
  ChosenStages chosen;
  double seconds_per_byte = 0;  // of a mean message
  double seconds_per_value = 0;

  const PipelineShape& shape() const { return candidate.shape; }
  bool recomputes_stages() const { return candidate.recompute == Recompute::kStages; }
};

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double held_always(const PlannedStage& stage, int num_versions) {
  const StageCosts& costs = stage.costs;
  return num_versions * costs.weight_bytes + stage.frozen_bytes + costs.gradient_bytes +
         costs.state_bytes;
}

// Seconds of the slowest rank over the mean of all.
double unevenness(const PipelineShape& shape, const std::vector<PlannedStage>& stages) {
  double slowest = 0;
  double sum = 0;
  for (int rank = 0; rank < shape.ranks; ++rank) {
    double seconds = 0;
    for (const int k : shape.stages_on(rank)) {
      seconds += work_of(stages[k].costs);
    }
    slowest = std::max(slowest, seconds);
    sum += seconds;
  }
  return sum > 0 ? slowest * shape.ranks / sum : 1;
}

}  // namespace

std::vector<int> first_layers(const std::vector<PlannedStage>& stages) {
  std::vector<int> firsts;
  for (const PlannedStage& stage : stages) firsts.push_back(stage.first);
  return firsts;
}

StageChooser::StageChooser(const PlanProblem& problem, const Layouts& layouts)
    : problem_(problem), layouts_(layouts), least_slowness_(kInfinity), positions_({0}) {
  const std::vector<bool>& can_cut = problem.model.can_cut;
  for (int layer = 1; layer <= problem.model.num_layers(); ++layer) {
    const bool is_end = layer == problem.model.num_layers();
    if (is_end || can_cut.empty() || can_cut[layer - 1]) positions_.push_back(layer);
  }
  for (const DeviceType& type : problem.cluster.types) {
    least_slowness_ = std::min(least_slowness_, type.slowness);
  }
  for (int size = 0; size < static_cast<int>(problem.model.microbatches.size()); ++size) {
    sums_.push_back(sums_of(problem.model, size));
    const std::vector<Edge>& edges = problem.model.microbatches[size].edges;
    const std::vector<std::int64_t> bytes =
        cut_bytes({std::vector<Layer>(problem.model.num_layers()), edges});
    double& largest = largest_messages_.emplace_back(0);
    for (std::size_t i = 1; i + 1 < positions_.size(); ++i) {
      largest = std::max(largest, static_cast<double>(bytes[positions_[i] - 1]));
    }
  }
}

StageChooser::Plan StageChooser::begin(const Candidate& candidate,
                                       const StageHolders& holders) const {
  return {
      candidate, problem_.model.microbatches[candidate.size], sums_[candidate.size], holders, {}, 0,
      0};
}

// Of the links between neighbouring ranks, in all layouts: one split does for all. Of a matrix that
// of any two devices: it does not depend on their numbers.
void StageChooser::set_mean_message(Plan& plan) {
  const int ranks = plan.shape().ranks;
  const int width = plan.candidate.width;
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
    plan.seconds_per_byte = per_byte;
    plan.seconds_per_value = per_value;
    return;
  }
  for (int layout = 0; layout < layouts_.count() && ranks > 1 && is_new; ++layout) {
    const DeviceGrid devices = layouts_.grid(layout, ranks, width);
    const double share = 1.0 / (double(layouts_.count()) * width * (ranks - 1));
    for (int rank = 1; rank < ranks; ++rank) {
      for (int replica = 0; replica < width; ++replica) {
        const Link link = link_between(problem_.cluster.topology, devices.at(rank - 1, replica),
                                       devices.at(rank, replica));
        per_byte += share / link.bandwidth;
        per_value += share * link.latency;
      }
    }
  }
  plan.seconds_per_byte = per_byte;
  plan.seconds_per_value = per_value;
}

std::vector<StageMemoryRule> StageChooser::memory_rules(const Plan& plan) const {
  const PipelineShape& shape = plan.shape();
  const bool again = plan.recomputes_stages();
  const int sharing = shape.stages_sharing_a_rank();
  std::vector<StageMemoryRule> rules(shape.depth());
  for (int stage = 0; stage < shape.depth(); ++stage) {
    StageMemoryRule& rule = rules[stage];
    rule.slowness = plan.holders.slowness[stage];
    const double in_flight = most_in_flight(shape, stage);
    rule.trained = shape.rule->num_versions + problem_.options.gradient + problem_.options.state;
    rule.activations = again ? most_recomputed(shape, stage) : in_flight;
    rule.inputs = again ? in_flight : 0;
    for (const int rank : shape.ranks_of(stage)) {
      rule.limit = std::min(rule.limit, plan.holders.limits[rank] / sharing);
    }
  }
  return rules;
}

StageSplitProblem StageChooser::split_problem(const Plan& plan) const {
  StageSplitProblem split;
  split.layers = plan.profiled.layers;
  split.edges = plan.profiled.edges;
  split.values = plan.profiled.shared;
  split.can_cut = problem_.model.can_cut;
  split.seconds_per_byte = plan.seconds_per_byte;
  split.seconds_per_value = plan.seconds_per_value;
  split.recompute = plan.recomputes_stages();
  return split;
}

StageChooser::SplitKey StageChooser::split_key(const Plan& plan) {
  return {plan.candidate.size,   plan.shape().depth(),   plan.recomputes_stages(),
          plan.seconds_per_byte, plan.seconds_per_value, plan.holders.slowness};
}

const std::vector<int>& StageChooser::balanced_split(const Plan& plan) {
  const auto [place, is_new] = balanced_.try_emplace(split_key(plan));
  if (is_new) {
    StageSplitProblem split = split_problem(plan);
    split.stages.resize(plan.shape().depth());
    for (int stage = 0; stage < plan.shape().depth(); ++stage) {
      split.stages[stage].slowness = plan.holders.slowness[stage];
    }
    place->second = split_stages(split)->first_layers;
  }
  return place->second;
}

bool StageChooser::may_fit(const Plan& plan, const std::vector<StageMemoryRule>& rules, int sharing,
                           double seconds) const {
  return pd2::may_fit({.candidate = plan.candidate,
                       .model = problem_.model,
                       .sums = plan.sums,
                       .rules = rules,
                       .limits = plan.holders.limits,
                       .least_slowness = least_slowness_},
                      sharing, seconds);
}

// Each of a rank's several stages keeps to an equal share of its memory: of what runs again too, or
// of `sharing_again` stages that share its memory all of it.
std::optional<std::vector<int>> StageChooser::fitting_split(const Plan& plan,
                                                            int sharing_again) const {
  StageSplitProblem split = split_problem(plan);
  split.stages = memory_rules(plan);
  for (StageMemoryRule& rule : split.stages) {
    if (rule.inputs > 0) rule.activations /= sharing_again;
  }
  if (!may_fit(plan, split.stages, 1, kInfinity)) return std::nullopt;
  std::optional<StageSplit> found = split_stages(split);
  if (!found) return std::nullopt;
  return std::move(found->first_layers);
}

void StageChooser::set_stages(Plan& plan, const std::vector<int>& firsts) const {
  const int n = problem_.model.num_layers();
  const int d = plan.shape().depth();
  const PlanOptions& options = problem_.options;
  std::vector<int> stage_of(n, 0);
  for (int k = 0; k < d; ++k) {
    std::fill(stage_of.begin() + firsts[k],
              k + 1 < d ? stage_of.begin() + firsts[k + 1] : stage_of.end(), k);
  }
  const auto messages = messages_between(plan.sums, stage_of);
  std::vector<double> received(d, 0);
  for (const auto& [from, to, bytes] : messages) received[to] += bytes;
  const std::vector<Received> shared = shared_bytes(plan.profiled.shared, stage_of, d);
  std::vector<PlannedStage> stages(d);
  for (int k = 0; k < d; ++k) {
    PlannedStage& stage = stages[k];
    stage.first = firsts[k];
    stage.end = k + 1 < d ? firsts[k + 1] : n;
    const LayerCost sum = plan.sums.of(stage.first, stage.end);
    const double trained = sum.trained_bytes + shared[k].trained;
    const double slow = plan.holders.slowness[k];
    const double action = problem_.model.seconds_per_action;
    stage.costs = {
        .forward = slow * sum.forward + action,
        .input_grad = slow * sum.input_grad + action,
        .weight_grad = slow * sum.weight_grad + (plan.shape().rule->is_split ? action : 0),
        .recompute = plan.recomputes_stages() ? slow * sum.forward : 0,
        .update = slow * trained * problem_.model.seconds_per_update_byte,
        .activation_bytes = sum.activation_bytes + (plan.recomputes_stages() ? 0 : shared[k].kept),
        .input_bytes = plan.recomputes_stages() ? received[k] : 0,
        .weight_bytes = trained,
        .gradient_bytes = options.gradient * trained,
        .state_bytes = options.state * trained};
    stage.frozen_bytes = sum.parameter_bytes - sum.trained_bytes + shared[k].frozen;
    stage.most_in_flight = most_in_flight(plan.shape(), k);
    stage.memory_limit = std::numeric_limits<double>::infinity();
    for (const int rank : plan.shape().ranks_of(k)) {
      stage.memory_limit = std::min(stage.memory_limit, plan.holders.limits[rank]);
    }
  }
  plan.chosen.edges.assign(d - 1, {});
  plan.chosen.skips.clear();
  for (const auto& [from, to, bytes] : messages) {
    if (to == from + 1) {
      plan.chosen.edges[from].message_bytes = bytes;
    } else if (bytes > 0) {
      plan.chosen.skips.push_back({from, to, {.message_bytes = bytes}});
    }
  }
  plan.chosen.stages = std::move(stages);
}

// Of all ranks; whether they are within their limits.
bool StageChooser::set_memory(Plan& plan) const {
  const PipelineShape& shape = plan.shape();
  bool fits = true;
  plan.chosen.peak_bytes = 0;
  for (int rank = 0; rank < shape.ranks; ++rank) {
    double bytes = 0;
    double largest_again = 0;
    for (const int k : shape.stages_on(rank)) {
      PlannedStage& stage = plan.chosen.stages[k];
      const double held = most_recomputed(shape, k);
      double kept = stage.costs.activation_bytes;
      double again = 0;
      if (plan.recomputes_stages()) {
        kept = stage.costs.input_bytes;
        again = held * stage.costs.activation_bytes;
      }
      for (const int block : stage.blocks) {
        again = std::max(again, held * plan.sums.blocks[block].activation_bytes);
      }
      const double all = held_always(stage, shape.rule->num_versions) + stage.most_in_flight * kept;
      stage.peak_bytes = all + again;
      bytes += all;
      largest_again = std::max(largest_again, again);
    }
    bytes += largest_again;
    plan.chosen.peak_bytes = std::max(plan.chosen.peak_bytes, bytes);
    fits = fits && is_within(bytes, plan.holders.limits[rank]);
  }
  return fits;
}

// On every rank that needs it; whether they are enough. A stage's blocks are those that lie within.
bool StageChooser::recompute_blocks(Plan& plan) const {
  const PipelineShape& shape = plan.shape();
  for (int rank = 0; rank < shape.ranks; ++rank) {
    double needed = -plan.holders.limits[rank];
    std::vector<BlockChoice> choices;
    std::vector<std::pair<int, int>> places;  // stage and block
    for (const int k : shape.stages_on(rank)) {
      const PlannedStage& stage = plan.chosen.stages[k];
      needed += held_always(stage, shape.rule->num_versions) +
                stage.most_in_flight * stage.costs.activation_bytes;
      const std::vector<Block>& blocks = problem_.model.blocks;
      const auto first = std::ranges::lower_bound(blocks, stage.first, {}, &Block::first);
      for (auto block = first; block != blocks.end() && block->end <= stage.end; ++block) {
        const auto b = static_cast<int>(block - blocks.begin());
        const LayerCost& sum = plan.sums.blocks[b];
        const double saved = sum.activation_bytes - plan.sums.block_inputs[b];
        choices.push_back({.saves = stage.most_in_flight * saved,
                           .again = most_recomputed(shape, k) * sum.activation_bytes,
                           .takes = plan.holders.slowness[k] * sum.forward});
        places.push_back({k, b});
      }
    }
    const auto chosen = choose_blocks(choices, needed);
    if (!chosen) return false;
    for (const int i : *chosen) recompute_block(plan, places[i].first, places[i].second);
  }
  return true;
}

void StageChooser::recompute_block(Plan& plan, int k, int b) const {
  const LayerCost& sum = plan.sums.blocks[b];
  PlannedStage& stage = plan.chosen.stages[k];
  stage.blocks.push_back(b);
  stage.costs.activation_bytes -= sum.activation_bytes - plan.sums.block_inputs[b];
  // A block runs again when its gradient has come: in I, and in W once more.
  stage.costs.input_grad += plan.holders.slowness[k] * sum.forward;
  if (plan.shape().rule->is_split) {
    stage.costs.weight_grad += plan.holders.slowness[k] * sum.forward;
  }
}

std::vector<ChosenStages> StageChooser::choose_splits(Plan& plan, double seconds) {
  std::vector<ChosenStages> found;
  if (!may_fit(plan, memory_rules(plan), plan.shape().stages_sharing_a_rank(), seconds)) {
    return found;
  }
  set_mean_message(plan);
  const auto add = [&](const std::optional<std::vector<int>>& firsts) {
    if (!firsts) return;
    set_stages(plan, *firsts);
    if (set_memory(plan)) found.push_back(plan.chosen);
  };
  // Of many pieces a folded one is as even, and found sooner.
  const bool may_search =
      !plan.shape().rule->is_bidirectional || num_pieces() <= kMostPiecesForRanks;
  if (may_search) {
    // Where memory was too small for the last one, it probably is for this one, too. With a stage a
    // rank the fitting one is the balanced one, if that fits: then only time would be lost.
    const bool may_skip = plan.shape().stages_sharing_a_rank() == 1;
    bool& is_tight = is_memory_tight_[plan.recomputes_stages()];
    if (!may_skip || !is_tight || balanced_.contains(split_key(plan))) {
      add(balanced_split(plan));
      if (may_skip) is_tight = found.empty();
    }
    const int sharing = plan.recomputes_stages() ? plan.shape().stages_sharing_a_rank() : 1;
    if (found.empty()) add(fitting_split(plan, sharing));
    if (found.empty() && sharing > 1) add(fitting_split(plan, 1));
  }
  const double message = largest_message(plan.candidate) * plan.seconds_per_byte;
  if (may_search && !found.empty() &&
      is_message_exposed(plan.candidate, message + plan.seconds_per_value)) {
    const std::vector<int> firsts = split_with_free_messages(plan);
    const bool is_other = firsts != first_layers(found[0].stages);
    const std::size_t before = found.size();
    if (is_other) add(firsts);
    found.back().is_fastest = !is_other || found.size() > before;
  }
  if (plan.shape().rule->is_bidirectional) add(folded_split(plan));
  if (may_balance_ranks(plan, found)) add(split_of_ranks(plan));
  return found;
}

bool StageChooser::choose_split_for_blocks(Plan& plan, double seconds) {
  if (!may_fit(plan, memory_rules(plan), plan.shape().stages_sharing_a_rank(), seconds)) {
    return false;
  }
  set_mean_message(plan);
  set_stages(plan, balanced_split(plan));
  if (set_memory(plan)) {
    const std::vector<Recompute>& ways = problem_.options.recompute;
    return std::ranges::find(ways, Recompute::kNone) == ways.end();
  }
  return recompute_blocks(plan) && set_memory(plan);
}

// Several stages share their rank's memory as they need it.
StageSplitProblem StageChooser::split_problem_of_ranks(const Plan& plan) const {
  StageSplitProblem split = split_problem(plan);
  split.stages = memory_rules(plan);
  for (StageMemoryRule& rule : split.stages) rule.limit *= plan.shape().stages_sharing_a_rank();
  return split;
}

std::optional<std::vector<int>> StageChooser::folded_split(const Plan& plan) const {
  return split_folded(split_problem_of_ranks(plan));
}

std::vector<int> StageChooser::split_with_free_messages(Plan plan) {
  plan.seconds_per_byte = 0;
  plan.seconds_per_value = 0;
  return balanced_split(plan);
}

std::optional<std::vector<int>> StageChooser::split_of_ranks(const Plan& plan) const {
  std::optional<InterleavedSplit> found =
      split_interleaved(split_problem_of_ranks(plan), plan.shape().ranks);
  if (!found) return std::nullopt;
  return std::move(found->split.first_layers);
}

bool StageChooser::may_balance_ranks(const Plan& plan,
                                     const std::vector<ChosenStages>& found) const {
  if (plan.shape().stages_per_rank == 1 || num_pieces() > kMostPiecesForRanks) return false;
  return found.empty() || unevenness(plan.shape(), found.front().stages) >= kUnevenRanks;
}

// Where all devices are alike, other layouts of a candidate have the same stages, or none. What did
// not fit the time does not fit less time either.
std::vector<ChosenStages> StageChooser::choose(const Candidate& candidate,
                                               const StageHolders& holders, double seconds) {
  const bool are_alike = problem_.cluster.types.size() == 1;
  if (are_alike && last_ && same_but_layout(last_->candidate, candidate) &&
      (!last_->chosen.empty() || seconds <= last_->seconds)) {
    return last_->chosen;
  }
  Plan plan = begin(candidate, holders);
  last_ = {candidate, seconds, {}};
  if (candidate.recompute != Recompute::kBlocks) {
    last_->chosen = choose_splits(plan, seconds);
  } else if (choose_split_for_blocks(plan, seconds)) {
    last_->chosen.push_back(std::move(plan.chosen));
  }
  return last_->chosen;
}

bool StageChooser::is_message_exposed(const Candidate& candidate, double seconds) const {
  const LayerCost& all = sums_[candidate.size].of_all();
  const double work = all.forward + all.input_grad + all.weight_grad;
  return seconds > kFreeMessage * least_slowness_ * work / candidate.shape.depth();
}

std::optional<ChosenStages> StageChooser::stages_of(const Candidate& candidate,
                                                    const StageHolders& holders,
                                                    const std::vector<int>& firsts) const {
  Plan plan = begin(candidate, holders);
  set_stages(plan, firsts);
  if (!set_memory(plan)) return std::nullopt;
  return std::move(plan.chosen);
}

std::vector<std::vector<int>> StageChooser::splits_for(const Candidate& candidate,
                                                       const StageHolders& holders,
                                                       const std::vector<EdgeCosts>& edges) const {
  const Plan plan = begin(candidate, holders);
  const int n = problem_.model.num_layers();
  const int d = plan.shape().depth();
  LayerGraph near = {std::vector<Layer>(n), {}};
  for (const Edge& edge : plan.profiled.edges) {
    if ((edge.consumer - edge.producer - 1) * d < n) near.edges.push_back(edge);
  }
  const std::vector<std::int64_t> bytes = cut_bytes(near);
  const std::vector<StageMemoryRule> rules = memory_rules(plan);
  const int sharing = plan.shape().stages_sharing_a_rank();
  BoundarySplitProblem split;
  for (const int layer : positions_) {
    const LayerCost& sum = plan.sums.before[layer];
    const int forwards = plan.recomputes_stages() ? 2 : 1;
    split.seconds_before.push_back(forwards * sum.forward + sum.input_grad + sum.weight_grad);
    const bool is_cut = layer > 0 && layer < n;
    split.bytes.push_back(is_cut ? static_cast<double>(bytes[layer - 1]) : 0);
  }
  split.slowness = holders.slowness;
  split.step = plan.shape().rule->is_eager() ? 2 : 1;
  for (const EdgeCosts& edge : edges) {
    split.latency.push_back(edge.latency);
    split.seconds_per_byte.push_back(edge.bandwidth > 0 ? 1 / edge.bandwidth : 0);
  }
  split.fits = [&](int k, int first, int end) {
    const LayerCost sum = plan.sums.of(positions_[first], positions_[end]);
    const double held = rules[k].trained * sum.trained_bytes +
                        rules[k].frozen * (sum.parameter_bytes - sum.trained_bytes) +
                        rules[k].activations * sum.activation_bytes;
    return is_within(held, sharing * rules[k].limit);
  };
  std::vector<std::vector<int>> splits = split_by_boundaries(split);
  for (std::vector<int>& firsts : splits) {
    for (int& first : firsts) first = positions_[first];
  }
  return splits;
}

double StageChooser::least_memory(const Candidate& candidate, const StageHolders& holders) const {
  const Plan plan = begin(candidate, holders);
  StageSplitProblem split = split_problem(plan);
  split.stages = memory_rules(plan);
  return candidate.shape.stages_sharing_a_rank() * smallest_memory_limit(split);
}

}  // namespace pd2
