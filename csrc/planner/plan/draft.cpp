#include "planner/plan/draft.h"

#include "core/infinity.h"
#include "planner/plan/blocks.h"

#include <algorithm>
#include <utility>

namespace pd2 {
namespace {

double held_always(const PlannedStage& stage) {
  const StageCosts& costs = stage.costs;
  return stage.num_versions * costs.weight_bytes + stage.frozen_bytes + costs.gradient_bytes +
         costs.state_bytes + stage.message_bytes;
}

// The most bytes that a rank's stages keep of microbatches in flight, in their order on it.
double kept_in_flight(const PipelineShape& shape, int rank, const std::vector<double>& kept) {
  double most = 0;
  if (shape.method->is_v()) {
    for (const auto& [first, second] : counts_of_v(shape).together[rank]) {
      most = std::max(most, first * kept[0] + second * kept[1]);
    }
    return most;
  }
  std::size_t i = 0;
  for (const int stage : shape.stages_on(rank)) most += most_in_flight(shape, stage) * kept[i++];
  return most;
}

}  // namespace

std::vector<int> first_layers(const std::vector<PlannedStage>& stages) {
  std::vector<int> firsts;
  for (const PlannedStage& stage : stages) firsts.push_back(stage.first);
  return firsts;
}

std::vector<StageMemoryRule> StageDraft::memory_rules() const {
  const bool again = recomputes_stages();
  const int sharing = shape.stages_sharing_a_rank();
  std::vector<StageMemoryRule> rules(shape.depth());
  for (int stage = 0; stage < shape.depth(); ++stage) {
    StageMemoryRule& rule = rules[stage];
    rule.slowness = holders.slowness[stage];
    const double in_flight = in_flight_with_others(shape, stage);
    rule.trained = shape.num_versions(stage) + problem.options.gradient + held_state();
    rule.activations = again ? most_recomputed(shape, stage) : in_flight;
    rule.inputs = again ? in_flight : 0;
    for (const int rank : shape.ranks_of(stage)) {
      double left = holders.limits[rank];
      if (!chosen.stages.empty()) {
        for (const int k : shape.stages_on(rank)) left -= chosen.stages[k].message_bytes;
      }
      rule.limit = std::min(rule.limit, std::max(left, 0.0) / sharing);
    }
  }
  return rules;
}

StageSplitProblem StageDraft::split_problem(std::vector<StageMemoryRule> rules) const {
  return {.layers = profiled.layers,
          .edges = profiled.edges,
          .values = profiled.shared,
          .can_cut = problem.model.can_cut,
          .stages = std::move(rules),
          .seconds_per_byte = seconds_per_byte,
          .seconds_per_value = seconds_per_value,
          .recompute = recomputes_stages()};
}

// The least seconds of a batch, from the work of one stage and of what comes before it.
double StageDraft::least_seconds(const LayerCost& before, const LayerCost& stage,
                                 double slowness) const {
  const ScheduleMethod& method = *shape.method;
  const double m = shape.microbatches_of_copy();
  const double halves = stage.forward + stage.input_grad;
  const double work =
      m * slowness * (halves + stage.weight_grad + (recomputes_stages() ? stage.forward : 0));
  if (!method.is_flushed() || method.is_bidirectional() || method.has_chunks) return work;
  const double way = problem.cluster.least_slowness() * (before.forward + before.input_grad);
  if (method.is_split) return std::max(work, way + m * slowness * halves);
  return way + problem.cluster.least_slowness() * before.weight_grad + work;
}

// Compares what all ranks hold with all of their memory, where ranks hold several stages. It counts
// only the activations that every stage keeps of the fewest microbatches.
bool StageDraft::may_fit_together(const std::vector<StageMemoryRule>& rules) const {
  const LayerCost& all = sums.of_all();
  double inputs = 0;
  double fewest = kInfinity;
  for (std::size_t k = 0; k < rules.size(); ++k) {
    if (k > 0) inputs += rules[k].inputs * sums.least_received;
    fewest = std::min(fewest, rules[k].activations);
  }
  if (candidate.recompute != Recompute::kNone) fewest = 0;
  const int copies = shape.method->is_bidirectional() ? 2 : 1;
  const double bytes = rules.front().trained * all.trained_bytes +
                       rules.front().frozen * (all.parameter_bytes - all.trained_bytes) + inputs +
                       fewest * all.activation_bytes;
  double limits = 0;
  for (const double limit : holders.limits) limits += limit;
  return is_within(copies * bytes, limits);
}

// How far the stage may reach that begins at `first`; `first` if it cannot hold one layer.
int StageDraft::furthest_end(const StageMemoryRule& rule, int first, int sharing,
                             double seconds) const {
  const int n = problem.model.num_layers();
  const bool chooses_blocks = candidate.recompute == Recompute::kBlocks;
  const LayerCost before = sums.of(0, first);
  const double inputs = first > 0 ? rule.inputs * sums.least_received : 0;
  int reached = first;
  for (int end = first + 1; end <= n; ++end) {
    const LayerCost sum = sums.of(first, end);
    double bytes = inputs + rule.bytes(sum);
    double least = least_seconds(before, sum, rule.slowness);
    if (chooses_blocks && bytes > sharing * rule.limit) {
      // At the least seconds per byte that any block saves.
      const double saved = (bytes - sharing * rule.limit) / rule.activations;
      if (saved > sum.activation_bytes) break;
      bytes = 0;
      const int times = shape.method->is_split ? 2 : 1;
      least += times * shape.num_microbatches * rule.slowness * saved * sums.seconds_per_saved_byte;
    }
    if (!is_within(bytes, sharing * rule.limit) || least > seconds * (1 + 1e-9)) break;
    if (end == n || problem.model.may_cut(end - 1)) reached = end;
  }
  return reached;
}

bool StageDraft::may_fit(const std::vector<StageMemoryRule>& rules, int sharing,
                         double seconds) const {
  if (sharing > 1 && !may_fit_together(rules)) return false;
  int first = 0;
  for (const StageMemoryRule& rule : rules) {
    first = furthest_end(rule, first, sharing, seconds);
    if (first == problem.model.num_layers()) return true;
  }
  return false;
}

void StageDraft::set_stages(const std::vector<int>& firsts) {
  const int n = problem.model.num_layers();
  const int d = shape.depth();
  const PlanOptions& options = problem.options;
  std::vector<int> stage_of(n, 0);
  for (int k = 0; k < d; ++k) {
    std::fill(stage_of.begin() + firsts[k],
              k + 1 < d ? stage_of.begin() + firsts[k + 1] : stage_of.end(), k);
  }
  const auto messages = messages_between(sums, stage_of);
  std::vector<double> received(d, 0);
  std::vector<double> sent(d, 0);  // as large as the gradients that come back
  for (const auto& [from, to, bytes] : messages) {
    received[to] += bytes;
    sent[from] += bytes;
  }
  const std::vector<Received> shared = shared_bytes(profiled.shared, stage_of, d);
  std::vector<PlannedStage> stages(d);
  for (int k = 0; k < d; ++k) {
    PlannedStage& stage = stages[k];
    stage.first = firsts[k];
    stage.end = k + 1 < d ? firsts[k + 1] : n;
    const LayerCost sum = sums.of(stage.first, stage.end);
    const double trained = sum.trained_bytes + shared[k].trained;
    const double slow = holders.slowness[k];
    const double action = problem.model.seconds_per_action;
    stage.costs = {
        .forward = slow * sum.forward + action,
        .input_grad = slow * sum.input_grad + action,
        .weight_grad = slow * sum.weight_grad + (shape.method->is_split ? action : 0),
        .recompute = recomputes_stages() ? slow * sum.forward : 0,
        .update = slow * trained * problem.model.seconds_per_update_byte *
                  options.stepped(candidate.width),
        .activation_bytes = sum.activation_bytes + (recomputes_stages() ? 0 : shared[k].kept),
        .input_bytes = recomputes_stages() ? received[k] : 0,
        .weight_bytes = trained,
        .gradient_bytes = options.gradient * trained,
        .state_bytes = held_state() * trained};
    stage.message_bytes = options.microbatches_behind * (received[k] + sent[k]);
    stage.summed_bytes = options.summed() * trained;
    stage.frozen_bytes = sum.parameter_bytes - sum.trained_bytes + shared[k].frozen;
    stage.num_versions = shape.num_versions(k);
    stage.most_in_flight = most_in_flight(shape, k);
    stage.memory_limit = kInfinity;
    for (const int rank : shape.ranks_of(k)) {
      stage.memory_limit = std::min(stage.memory_limit, holders.limits[rank]);
    }
  }
  if (options.steps_on_host) {
    // The steps' times have the copies in them. Gradients wider than weights have one buffer.
    chosen.costs.host = HostCosts{.one_buffer = options.gradient > 1};
  }
  chosen.costs.edges.assign(d - 1, {});
  chosen.costs.skips.clear();
  for (const auto& [from, to, bytes] : messages) {
    if (to == from + 1) {
      chosen.costs.edges[from].message_bytes = bytes;
    } else if (bytes > 0) {
      chosen.costs.skips.push_back({from, to, {.message_bytes = bytes}});
    }
  }
  chosen.stages = std::move(stages);
}

bool StageDraft::set_memory() {
  bool fits = true;
  chosen.peak_bytes = 0;
  for (int rank = 0; rank < shape.ranks; ++rank) {
    double bytes = 0;
    double most_again = 0;
    std::vector<double> all_kept;  // of a microbatch, by stage
    for (const int k : shape.stages_on(rank)) {
      PlannedStage& stage = chosen.stages[k];
      const double held = most_recomputed(shape, k);
      double kept = stage.costs.activation_bytes;
      double again = 0;
      if (recomputes_stages()) {
        kept = stage.costs.input_bytes;
        again = held * stage.costs.activation_bytes;
      }
      for (const int block : stage.blocks) {
        again = std::max(again, held * sums.blocks[block].activation_bytes);
      }
      const double always = held_always(stage);
      stage.peak_bytes = always + stage.most_in_flight * kept + again;
      bytes += always;
      all_kept.push_back(kept);
      most_again = shape.recomputes_together() ? most_again + again : std::max(most_again, again);
    }
    bytes += most_again + kept_in_flight(shape, rank, all_kept);
    chosen.peak_bytes = std::max(chosen.peak_bytes, bytes);
    fits = fits && is_within(bytes, holders.limits[rank]);
  }
  return fits;
}

// A stage's blocks are those that lie within it.
bool StageDraft::recompute_blocks() {
  for (int rank = 0; rank < shape.ranks; ++rank) {
    double needed = -holders.limits[rank];
    std::vector<BlockChoice> choices;
    std::vector<std::pair<int, int>> places;  // stage and block
    for (const int k : shape.stages_on(rank)) {
      const PlannedStage& stage = chosen.stages[k];
      needed += held_always(stage) + stage.most_in_flight * stage.costs.activation_bytes;
      const std::vector<Block>& blocks = problem.model.blocks;
      const auto first = std::ranges::lower_bound(blocks, stage.first, {}, &Block::first);
      for (auto block = first; block != blocks.end() && block->end <= stage.end; ++block) {
        const auto b = static_cast<int>(block - blocks.begin());
        const LayerCost& sum = sums.blocks[b];
        const double saved = sum.activation_bytes - sums.block_inputs[b];
        choices.push_back({.saves = stage.most_in_flight * saved,
                           .again = most_recomputed(shape, k) * sum.activation_bytes,
                           .takes = holders.slowness[k] * sum.forward});
        places.push_back({k, b});
      }
    }
    const auto chosen = choose_blocks(choices, needed);
    if (!chosen) return false;
    for (const int i : *chosen) recompute_block(places[i].first, places[i].second);
  }
  return true;
}

void StageDraft::recompute_block(int k, int b) {
  const LayerCost& sum = sums.blocks[b];
  PlannedStage& stage = chosen.stages[k];
  stage.blocks.push_back(b);
  stage.costs.activation_bytes -= sum.activation_bytes - sums.block_inputs[b];
  // A block runs again when its gradient has come: in I, and in W once more.
  stage.costs.input_grad += holders.slowness[k] * sum.forward;
  if (shape.method->is_split) {
    stage.costs.weight_grad += holders.slowness[k] * sum.forward;
  }
}

}  // namespace pd2
