#include "core/plan/fit.h"

#include <algorithm>
#include <limits>

namespace pd2 {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The least seconds of a batch, from the work of one stage and of what comes before it.
double least_seconds_of_stage(const FitQuestion& question, const LayerCost& before,
                              const LayerCost& stage, double slowness) {
  const Candidate& candidate = question.candidate;
  const ScheduleMethod& method = *candidate.shape.method;
  const double m = candidate.shape.num_microbatches * (method.is_bidirectional() ? 0.5 : 1);
  const bool again = candidate.recompute == Recompute::kStages;
  const double halves = stage.forward + stage.input_grad;
  const double work = m * slowness * (halves + stage.weight_grad + (again ? stage.forward : 0));
  if (!method.is_flushed() || method.is_bidirectional() || method.has_chunks) return work;
  const double way = question.least_slowness * (before.forward + before.input_grad);
  if (method.is_split) return std::max(work, way + m * slowness * halves);
  return way + question.least_slowness * before.weight_grad + work;
}

// Compares what all ranks hold with all of their memory, where ranks hold several stages. It counts
// only the activations that every stage keeps of the fewest microbatches.
bool may_fit_together(const FitQuestion& question) {
  const std::vector<StageMemoryRule>& rules = question.rules;
  const LayerCost& all = question.sums.of_all();
  double inputs = 0;
  double fewest = kInfinity;
  for (std::size_t k = 0; k < rules.size(); ++k) {
    if (k > 0) inputs += rules[k].inputs * question.sums.least_received;
    fewest = std::min(fewest, rules[k].activations);
  }
  if (question.candidate.recompute != Recompute::kNone) fewest = 0;
  const int copies = question.candidate.shape.method->is_bidirectional() ? 2 : 1;
  const double bytes = rules.front().trained * all.trained_bytes +
                       rules.front().frozen * (all.parameter_bytes - all.trained_bytes) + inputs +
                       fewest * all.activation_bytes;
  double limits = 0;
  for (const double limit : question.limits) limits += limit;
  return is_within(copies * bytes, limits);
}

// How far the stage may reach that begins at `first`; `first` if it cannot hold one layer.
int furthest_end(const FitQuestion& question, const StageMemoryRule& rule, int first, int sharing,
                 double seconds) {
  const PipelineShape& shape = question.candidate.shape;
  const LayerSums& sums = question.sums;
  const int n = question.model.num_layers();
  const std::vector<bool>& can_cut = question.model.can_cut;
  const bool chooses_blocks = question.candidate.recompute == Recompute::kBlocks;
  const LayerCost before = sums.of(0, first);
  const double inputs = first > 0 ? rule.inputs * sums.least_received : 0;
  int reached = first;
  for (int end = first + 1; end <= n; ++end) {
    const LayerCost sum = sums.of(first, end);
    double bytes = inputs + rule.trained * sum.trained_bytes +
                   rule.frozen * (sum.parameter_bytes - sum.trained_bytes) +
                   rule.activations * sum.activation_bytes;
    double least = least_seconds_of_stage(question, before, sum, rule.slowness);
    if (chooses_blocks && bytes > sharing * rule.limit) {
      // At the least seconds per byte that any block saves.
      const double saved = (bytes - sharing * rule.limit) / rule.activations;
      if (saved > sum.activation_bytes) break;
      bytes = 0;
      const int times = shape.method->is_split ? 2 : 1;
      least += times * shape.num_microbatches * rule.slowness * saved * sums.seconds_per_saved_byte;
    }
    if (!is_within(bytes, sharing * rule.limit) || least > seconds * (1 + 1e-9)) break;
    if (end == n || can_cut.empty() || can_cut[end - 1]) reached = end;
  }
  return reached;
}

}  // namespace

bool is_within(double bytes, double limit) { return bytes <= limit * (1 + 1e-9); }

bool may_fit(const FitQuestion& question, int sharing, double seconds) {
  if (sharing > 1 && !may_fit_together(question)) return false;
  const int n = question.model.num_layers();
  int first = 0;
  for (const StageMemoryRule& rule : question.rules) {
    first = furthest_end(question, rule, first, sharing, seconds);
    if (first == n) return true;
  }
  return false;
}

}  // namespace pd2
