#include "core/plan_evaluate.h"

#include "core/check.h"
#include "core/plan_blocks.h"

#include <algorithm>
#include <utility>

namespace pd2 {

struct Evaluator::Plan {
  const Candidate& candidate;
  const ProfiledRows& profiled;
  Evaluation result;
  std::vector<double> slowness;  // by stage
  std::vector<double> limits;    // by rank
  double seconds_per_byte = 0;   // of a mean message
  double seconds_per_value = 0;

  const PipelineShape& shape() const { return candidate.shape; }
  bool recomputes_stages() const { return candidate.recompute == Recompute::kStages; }

  std::vector<int> ranks_of(int stage) const {
    const int rank = stage % shape().ranks;
    if (!shape().rule->is_bidirectional) return {rank};
    return {rank, shape().ranks - 1 - rank};
  }
};

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Of a block or a stage: the bytes of the values from before it that its layers read. The edges are
// sorted by producer and consumer.
double received_bytes(const std::vector<Edge>& edges, int first, int end) {
  double sum = 0;
  for (std::size_t i = 0; i < edges.size();) {
    const int producer = edges[i].producer;
    std::int64_t bytes = 0;
    for (; i < edges.size() && edges[i].producer == producer; ++i) {
      if (edges[i].consumer >= first && edges[i].consumer < end) {
        bytes = std::max(bytes, edges[i].bytes);
      }
    }
    if (producer < first) sum += static_cast<double>(bytes);
  }
  return sum;
}

// Of every stage: of each value once.
std::vector<double> received_bytes(const std::vector<Edge>& edges, const std::vector<int>& stage_of,
                                   int num_stages) {
  std::vector<double> sums(num_stages, 0);
  for (std::size_t i = 0; i < edges.size();) {
    const int producer = edges[i].producer;
    const int stage = stage_of[edges[i].consumer];
    std::int64_t bytes = 0;
    for (;
         i < edges.size() && edges[i].producer == producer && stage_of[edges[i].consumer] == stage;
         ++i) {
      bytes = std::max(bytes, edges[i].bytes);
    }
    if (stage_of[producer] != stage) sums[stage] += static_cast<double>(bytes);
  }
  return sums;
}

LayerCost sum_of(const std::vector<LayerCost>& sums, int first, int end) {
  const LayerCost& a = sums[first];
  const LayerCost& b = sums[end];
  return {.forward = b.forward - a.forward,
          .input_grad = b.input_grad - a.input_grad,
          .weight_grad = b.weight_grad - a.weight_grad,
          .activation_bytes = b.activation_bytes - a.activation_bytes,
          .parameter_bytes = b.parameter_bytes - a.parameter_bytes,
          .trained_bytes = b.trained_bytes - a.trained_bytes};
}

double held_always(const PlannedStage& stage, int num_versions) {
  const StageCosts& costs = stage.costs;
  return num_versions * costs.weight_bytes + stage.frozen_bytes + costs.gradient_bytes +
         costs.state_bytes;
}

// Of a batch, from the work of one stage and of what comes before it.
double least_seconds_of_stage(const Candidate& candidate, const LayerCost& before,
                              const LayerCost& stage, double slowness, double least_slowness) {
  const ScheduleRule& rule = *candidate.shape.rule;
  const double m = candidate.shape.num_microbatches * (rule.is_bidirectional ? 0.5 : 1);
  const bool again = candidate.recompute == Recompute::kStages;
  const double halves = stage.forward + stage.input_grad;
  const double work = m * slowness * (halves + stage.weight_grad + (again ? stage.forward : 0));
  if (!rule.is_flushed() || rule.is_bidirectional || rule.has_chunks) return work;
  const double way = least_slowness * (before.forward + before.input_grad);
  if (rule.is_split) return std::max(work, way + m * slowness * halves);
  return way + least_slowness * before.weight_grad + work;
}

// Stages of the model on one rank.
int stages_sharing(const PipelineShape& shape) {
  return shape.rule->is_bidirectional ? 2 : shape.stages_per_rank;
}

// Sums of many terms, in another order than the limit's.
bool is_within(double bytes, double limit) { return bytes <= limit * (1 + 1e-9); }

const Link& slower(const Link& a, const Link& b, double bytes) {
  return a.seconds(bytes) < b.seconds(bytes) ? b : a;
}

}  // namespace

Evaluator::Evaluator(const PlanProblem& problem, const Layouts& layouts)
    : problem_(problem), layouts_(layouts), bounds_(problem) {
  for (const DeviceType& type : problem.cluster.types) {
    least_slowness_ = std::min(least_slowness_, type.slowness);
  }
  for (const ProfiledRows& profiled : problem.model.microbatches) {
    received_.push_back(least_received(problem.model, static_cast<int>(received_.size())));
    add_sums(profiled);
  }
}

void Evaluator::add_sums(const ProfiledRows& profiled) {
  LayerCost sum;
  std::vector<LayerCost>& sums = sums_.emplace_back();
  sums.push_back(sum);
  for (const LayerCost& layer : profiled.layers) {
    sum.forward += layer.forward;
    sum.input_grad += layer.input_grad;
    sum.weight_grad += layer.weight_grad;
    sum.activation_bytes += layer.activation_bytes;
    sum.parameter_bytes += layer.parameter_bytes;
    sum.trained_bytes += layer.trained_bytes;
    sums.push_back(sum);
  }
  std::vector<Edge>& edges = edges_.emplace_back(profiled.edges);
  std::ranges::sort(edges, {}, [](const Edge& e) { return std::pair(e.producer, e.consumer); });
  std::vector<LayerCost>& blocks = blocks_.emplace_back();
  std::vector<double>& inputs = block_inputs_.emplace_back();
  double& least = seconds_per_saved_byte_.emplace_back(kInfinity);
  for (const Block& block : problem_.model.blocks) {
    blocks.push_back(sum_of(sums, block.first, block.end));
    inputs.push_back(received_bytes(edges, block.first, block.end));
    const double saved = blocks.back().activation_bytes - inputs.back();
    if (saved > 0) least = std::min(least, blocks.back().forward / saved);
  }
}

std::vector<StageMemoryRule> Evaluator::memory_rules(const Plan& plan) const {
  const PipelineShape& shape = plan.shape();
  const bool again = plan.recomputes_stages();
  const int sharing = stages_sharing(shape);
  std::vector<StageMemoryRule> rules(shape.depth());
  for (int stage = 0; stage < shape.depth(); ++stage) {
    StageMemoryRule& rule = rules[stage];
    rule.slowness = plan.slowness[stage];
    const double in_flight = most_in_flight(shape, stage);
    rule.trained = shape.rule->num_versions + problem_.options.gradient + problem_.options.state;
    rule.activations = again ? most_recomputed(shape, stage) : in_flight;
    rule.inputs = again ? in_flight : 0;
    for (const int rank : plan.ranks_of(stage)) {
      rule.limit = std::min(rule.limit, plan.limits[rank] / sharing);
    }
  }
  return rules;
}

StageSplitProblem Evaluator::split_problem(const Plan& plan) const {
  StageSplitProblem split;
  split.layers = plan.profiled.layers;
  split.edges = plan.profiled.edges;
  split.can_cut = problem_.model.can_cut;
  split.seconds_per_byte = plan.seconds_per_byte;
  split.seconds_per_value = plan.seconds_per_value;
  split.recompute = plan.recomputes_stages();
  return split;
}

const std::vector<int>& Evaluator::balanced_split(const Plan& plan) {
  const SplitKey key = {plan.candidate.size,   plan.shape().depth(),   plan.recomputes_stages(),
                        plan.seconds_per_byte, plan.seconds_per_value, plan.slowness};
  const auto [place, is_new] = balanced_.try_emplace(key);
  if (is_new) {
    StageSplitProblem split = split_problem(plan);
    split.stages.resize(plan.shape().depth());
    for (int stage = 0; stage < plan.shape().depth(); ++stage) {
      split.stages[stage].slowness = plan.slowness[stage];
    }
    place->second = split_stages(split)->first_layers;
  }
  return place->second;
}

// Where ranks hold several stages: what all ranks hold, against all of their memory. Of activations
// only those that every stage keeps of the fewest microbatches.
bool Evaluator::may_fit_together(const Plan& plan,
                                 const std::vector<StageMemoryRule>& rules) const {
  const LayerCost& all = sums_[plan.candidate.size].back();
  double inputs = 0;
  double fewest = kInfinity;
  for (std::size_t k = 0; k < rules.size(); ++k) {
    if (k > 0) inputs += rules[k].inputs * received_[plan.candidate.size];
    fewest = std::min(fewest, rules[k].activations);
  }
  if (plan.candidate.recompute != Recompute::kNone) fewest = 0;
  const int copies = plan.shape().rule->is_bidirectional ? 2 : 1;
  const double bytes = rules.front().trained * all.trained_bytes +
                       rules.front().frozen * (all.parameter_bytes - all.trained_bytes) + inputs +
                       fewest * all.activation_bytes;
  double limits = 0;
  for (const double limit : plan.limits) limits += limit;
  return is_within(copies * bytes, limits);
}

// The furthest that stages reach, each one filled with `sharing` times
// its share of the memory and with as much work as
// leaves the batch below `seconds`, must be the last layer. Far cheaper than a split. Where batches
// drain, what comes before a stage on a microbatch's way there and back leaves it less time.
bool Evaluator::may_fit(const Plan& plan, int sharing, double seconds) const {
  const std::vector<StageMemoryRule> rules = memory_rules(plan);
  const bool chooses_blocks = plan.candidate.recompute == Recompute::kBlocks;
  if (sharing > 1 && !may_fit_together(plan, rules)) return false;
  const std::vector<LayerCost>& sums = sums_[plan.candidate.size];
  const int n = problem_.model.num_layers();
  const std::vector<bool>& can_cut = problem_.model.can_cut;
  int first = 0;
  for (const StageMemoryRule& rule : rules) {
    const LayerCost before = sum_of(sums, 0, first);
    const double inputs = first > 0 ? rule.inputs * received_[plan.candidate.size] : 0;
    int reached = first;
    for (int end = first + 1; end <= n; ++end) {
      const LayerCost sum = sum_of(sums, first, end);
      double bytes = inputs + rule.trained * sum.trained_bytes +
                     rule.frozen * (sum.parameter_bytes - sum.trained_bytes) +
                     rule.activations * sum.activation_bytes;
      double least =
          least_seconds_of_stage(plan.candidate, before, sum, rule.slowness, least_slowness_);
      if (chooses_blocks && bytes > sharing * rule.limit) {
        // At the least seconds per byte that any block saves.
        const double saved = (bytes - sharing * rule.limit) / rule.activations;
        if (saved > sum.activation_bytes) break;
        bytes = 0;
        const int times = plan.shape().rule->is_split ? 2 : 1;
        least += times * plan.shape().num_microbatches * rule.slowness * saved *
                 seconds_per_saved_byte_[plan.candidate.size];
      }
      if (!is_within(bytes, sharing * rule.limit) || least > seconds * (1 + 1e-9)) break;
      if (end == n || can_cut.empty() || can_cut[end - 1]) reached = end;
    }
    if (reached == n) return true;
    first = reached;
  }
  return false;
}

std::optional<std::vector<int>> Evaluator::fitting_split(const Plan& plan) const {
  StageSplitProblem split = split_problem(plan);
  split.stages = memory_rules(plan);
  if (!may_fit(plan, 1, kInfinity)) return std::nullopt;
  std::optional<StageSplit> found = split_stages(split);
  if (!found) return std::nullopt;
  return std::move(found->first_layers);
}

void Evaluator::set_stages(Plan& plan, const std::vector<int>& firsts) const {
  const int n = problem_.model.num_layers();
  const int d = plan.shape().depth();
  const PlanOptions& options = problem_.options;
  std::vector<int> stage_of(n, 0);
  std::vector<PlannedStage> stages(d);
  for (int k = 0; k < d; ++k) {
    PlannedStage& stage = stages[k];
    stage.first = firsts[k];
    stage.end = k + 1 < d ? firsts[k + 1] : n;
    std::fill(stage_of.begin() + stage.first, stage_of.begin() + stage.end, k);
    const LayerCost sum = sum_of(sums_[plan.candidate.size], stage.first, stage.end);
    const double slow = plan.slowness[k];
    const double action = problem_.model.seconds_per_action;
    stage.costs = {
        .forward = slow * sum.forward + action,
        .input_grad = slow * sum.input_grad + action,
        .weight_grad = slow * sum.weight_grad + (plan.shape().rule->is_split ? action : 0),
        .recompute = plan.recomputes_stages() ? slow * sum.forward : 0,
        .update = slow * sum.trained_bytes * problem_.model.seconds_per_update_byte,
        .activation_bytes = sum.activation_bytes,
        .weight_bytes = sum.trained_bytes,
        .gradient_bytes = options.gradient * sum.trained_bytes,
        .state_bytes = options.state * sum.trained_bytes};
    stage.frozen_bytes = sum.parameter_bytes - sum.trained_bytes;
    stage.most_in_flight = most_in_flight(plan.shape(), k);
    stage.memory_limit = std::numeric_limits<double>::infinity();
    for (const int rank : plan.ranks_of(k)) {
      stage.memory_limit = std::min(stage.memory_limit, plan.limits[rank]);
    }
  }
  const std::vector<double> received = received_bytes(edges_[plan.candidate.size], stage_of, d);
  plan.result.costs.edges.assign(d - 1, {});
  for (int k = 0; k < d; ++k) {
    if (k > 0) plan.result.costs.edges[k - 1].message_bytes = received[k];
    if (plan.recomputes_stages()) stages[k].costs.input_bytes = received[k];
  }
  plan.result.stages = std::move(stages);
}

// Of all ranks; whether they are within their limits.
bool Evaluator::set_memory(Plan& plan) const {
  const PipelineShape& shape = plan.shape();
  bool fits = true;
  plan.result.peak_bytes = 0;
  for (int rank = 0; rank < shape.ranks; ++rank) {
    double bytes = 0;
    double largest_again = 0;
    for (const int k : shape.stages_on(rank)) {
      PlannedStage& stage = plan.result.stages[k];
      const double held = most_recomputed(shape, k);
      double kept = stage.costs.activation_bytes;
      double again = 0;
      if (plan.recomputes_stages()) {
        kept = stage.costs.input_bytes;
        again = held * stage.costs.activation_bytes;
      }
      for (const int block : stage.blocks) {
        again = std::max(again, held * blocks_[plan.candidate.size][block].activation_bytes);
      }
      const double all = held_always(stage, shape.rule->num_versions) + stage.most_in_flight * kept;
      stage.peak_bytes = all + again;
      bytes += all;
      largest_again = std::max(largest_again, again);
    }
    bytes += largest_again;
    plan.result.peak_bytes = std::max(plan.result.peak_bytes, bytes);
    fits = fits && is_within(bytes, plan.limits[rank]);
  }
  return fits;
}

// On every rank that needs it; whether they are enough. A stage's blocks are those that lie within.
bool Evaluator::recompute_blocks(Plan& plan) const {
  const PipelineShape& shape = plan.shape();
  const int size = plan.candidate.size;
  for (int rank = 0; rank < shape.ranks; ++rank) {
    double needed = -plan.limits[rank];
    std::vector<BlockChoice> choices;
    std::vector<std::pair<int, int>> places;  // stage and block
    for (const int k : shape.stages_on(rank)) {
      const PlannedStage& stage = plan.result.stages[k];
      needed += held_always(stage, shape.rule->num_versions) +
                stage.most_in_flight * stage.costs.activation_bytes;
      const std::vector<Block>& blocks = problem_.model.blocks;
      const auto first = std::ranges::lower_bound(blocks, stage.first, {}, &Block::first);
      for (auto block = first; block != blocks.end() && block->end <= stage.end; ++block) {
        const auto b = static_cast<int>(block - blocks.begin());
        const LayerCost& sum = blocks_[size][b];
        const double saved = sum.activation_bytes - block_inputs_[size][b];
        choices.push_back({.saves = stage.most_in_flight * saved,
                           .again = most_recomputed(shape, k) * sum.activation_bytes,
                           .takes = plan.slowness[k] * sum.forward});
        places.push_back({k, b});
      }
    }
    const auto chosen = choose_blocks(choices, needed);
    if (!chosen) return false;
    for (const int i : *chosen) recompute_block(plan, places[i].first, places[i].second);
  }
  return true;
}

void Evaluator::recompute_block(Plan& plan, int k, int b) const {
  const int size = plan.candidate.size;
  const LayerCost& sum = blocks_[size][b];
  PlannedStage& stage = plan.result.stages[k];
  stage.blocks.push_back(b);
  stage.costs.activation_bytes -= sum.activation_bytes - block_inputs_[size][b];
  // A block runs again when its gradient has come: in I, and in W once more.
  stage.costs.input_grad += plan.slowness[k] * sum.forward;
  if (plan.shape().rule->is_split) stage.costs.weight_grad += plan.slowness[k] * sum.forward;
}

bool Evaluator::choose_split(Plan& plan, double seconds) {
  if (!may_fit(plan, stages_sharing(plan.shape()), seconds)) return false;
  set_mean_message(plan);
  set_stages(plan, balanced_split(plan));
  if (set_memory(plan)) return true;
  const std::optional<std::vector<int>> fitting = fitting_split(plan);
  if (!fitting) return false;
  set_stages(plan, *fitting);
  return set_memory(plan);
}

bool Evaluator::choose_split_for_blocks(Plan& plan, double seconds) {
  if (!may_fit(plan, stages_sharing(plan.shape()), seconds)) return false;
  set_mean_message(plan);
  set_stages(plan, balanced_split(plan));
  if (set_memory(plan)) {
    const std::vector<Recompute>& ways = problem_.options.recompute;
    return std::ranges::find(ways, Recompute::kNone) == ways.end();
  }
  return recompute_blocks(plan) && set_memory(plan);
}

// Where all devices are alike, other layouts of a candidate have the same stages, or none. What did
// not fit the time does not fit less time either.
bool Evaluator::choose_stages(Plan& plan, double seconds) {
  const bool are_alike = problem_.cluster.types.size() == 1;
  if (are_alike && last_ && same_but_layout(last_->candidate, plan.candidate) &&
      (last_->fits || seconds <= last_->seconds)) {
    plan.result.stages = last_->stages;
    plan.result.costs.edges = last_->edges;
    plan.result.peak_bytes = last_->peak_bytes;
    return last_->fits;
  }
  const bool fits = plan.candidate.recompute == Recompute::kBlocks
                        ? choose_split_for_blocks(plan, seconds)
                        : choose_split(plan, seconds);
  last_ = {plan.candidate,        fits, seconds, plan.result.stages, plan.result.costs.edges,
           plan.result.peak_bytes};
  return fits;
}

// Hops, and the time of adding up gradients, with these devices.
void Evaluator::set_links(Plan& plan, const DeviceGrid& devices) const {
  const PipelineShape& shape = plan.shape();
  const Topology& topology = problem_.cluster.topology;
  const int last = shape.ranks - 1;
  Costs& costs = plan.result.costs;
  for (int k = 0; k + 1 < shape.depth(); ++k) {
    EdgeCosts& edge = costs.edges[k];
    Link slowest;
    const auto take = [&](int from, int to) {
      for (int replica = 0; replica < devices.width() && from != to; ++replica) {
        const Link link =
            link_between(topology, devices.at(from, replica), devices.at(to, replica));
        slowest = slower(slowest, link, edge.message_bytes);
      }
    };
    const int from = k % shape.ranks;
    const int to = (k + 1) % shape.ranks;
    take(from, to);
    if (shape.rule->is_bidirectional) take(last - from, last - to);
    edge.latency = slowest.latency;
    edge.bandwidth = slowest.bandwidth;
    plan.result.stages[k].message = slowest.seconds(edge.message_bytes);
  }
  costs.stages.clear();
  for (int k = 0; k < shape.depth(); ++k) {
    std::vector<int> holders;
    for (const int rank : plan.ranks_of(k)) {
      const std::span<const int> of_rank = devices.of_rank(rank);
      holders.insert(holders.end(), of_rank.begin(), of_rank.end());
    }
    PlannedStage& stage = plan.result.stages[k];
    stage.devices.assign(holders.begin(), holders.begin() + devices.width());
    stage.costs.all_reduce =
        all_reduce_seconds(problem_.cluster, holders, stage.costs.gradient_bytes);
    costs.stages.push_back(stage.costs);
  }
  plan.result.devices = devices;
}

void Evaluator::search_devices(Plan& plan) const {
  const DeviceGrid before = plan.result.devices;
  const double seconds_before = step_time(plan.shape(), plan.result.costs).seconds;
  const DeviceGrid found = search_mapping(problem_.cluster, before, [&](const DeviceGrid& devices) {
    set_links(plan, devices);
    return closed_form_period(plan.shape(), plan.result.costs);
  });
  set_links(plan, found);
  if (step_time(plan.shape(), plan.result.costs).seconds > seconds_before) set_links(plan, before);
}

double Evaluator::score(const Candidate& candidate, const DeviceGrid& devices,
                        double seconds) const {
  const PlanOptions& options = problem_.options;
  const double per_row = seconds / candidate.batch();
  if (options.objective != Objective::kCost) return per_row;
  const double hours = per_row / 3600;
  if (options.num_batches == 0) {
    return hours * price_per_hour_now(problem_.cluster, devices.devices());
  }
  const double rows = options.num_batches * options.batch;
  return price_of(problem_.cluster, devices.devices(), hours * rows) / rows;
}

// Of the links between neighbouring ranks, in all layouts: one split does for all.
void Evaluator::set_mean_message(Plan& plan) {
  const int ranks = plan.shape().ranks;
  const int width = plan.candidate.width;
  const auto [place, is_new] = mean_messages_.try_emplace({ranks, width});
  auto& [per_byte, per_value] = place->second;
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

Evaluator::Plan Evaluator::begin(const Candidate& candidate) const {
  const PipelineShape& shape = candidate.shape;
  Plan plan = {candidate, problem_.model.microbatches[candidate.size], {}, {}, {}, 0, 0};
  plan.result.candidate = candidate;
  plan.result.devices = layouts_.grid(candidate.layout, shape.ranks, candidate.width);
  const DeviceGrid& devices = plan.result.devices;
  std::vector<double> slowness(shape.ranks, problem_.cluster.types.front().slowness);
  plan.limits.assign(shape.ranks, problem_.cluster.types.front().memory_bytes);
  for (int rank = 0; rank < shape.ranks && problem_.cluster.types.size() > 1; ++rank) {
    slowness[rank] = 0;
    plan.limits[rank] = kInfinity;
    for (const int device : devices.of_rank(rank)) {
      const DeviceType& type = problem_.cluster.type(device);
      slowness[rank] = std::max(slowness[rank], type.slowness);
      plan.limits[rank] = std::min(plan.limits[rank], type.memory_bytes);
    }
  }
  for (int stage = 0; stage < shape.depth(); ++stage) {
    double slowest = 0;
    for (const int rank : plan.ranks_of(stage)) slowest = std::max(slowest, slowness[rank]);
    plan.slowness.push_back(slowest);
  }
  return plan;
}

std::optional<Evaluation> Evaluator::evaluate(const Candidate& candidate, double worth) {
  Plan plan = begin(candidate);
  Evaluation& result = plan.result;
  const bool is_timed = problem_.options.objective != Objective::kCost;
  const double seconds = is_timed ? worth * candidate.batch() : kInfinity;
  if (!choose_stages(plan, seconds)) return std::nullopt;
  set_links(plan, DeviceGrid(result.devices));
  const double speed = layouts_.speed(candidate.layout, candidate.shape.ranks, candidate.width);
  Costs without_links = result.costs;
  for (StageCosts& stage : without_links.stages) stage.all_reduce = 0;
  const double least =
      std::max(bounds_.seconds(candidate, speed), busiest_rank(candidate.shape, without_links));
  if (score(candidate, result.devices, least) >= worth) return std::nullopt;
  if (std::holds_alternative<LinkMatrix>(problem_.cluster.topology)) search_devices(plan);
  result.time = step_time(candidate.shape, result.costs);
  if (least > result.time.seconds) {
    result.time = {least, 1 - busiest_rank(candidate.shape, result.costs) / least};
  }
  result.score = score(candidate, result.devices, result.time.seconds);
  return std::move(result);
}

double Evaluator::least_memory(const Candidate& candidate) const {
  const Plan plan = begin(candidate);
  StageSplitProblem split = split_problem(plan);
  split.stages = memory_rules(plan);
  return stages_sharing(candidate.shape) * smallest_memory_limit(split);
}

}  // namespace pd2
