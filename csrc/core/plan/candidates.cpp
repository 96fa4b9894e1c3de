#include "core/plan/candidates.h"

#include "core/check.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace pd2 {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

bool may_cut(const ProfiledModel& model, int after) {
  return model.can_cut.empty() || model.can_cut[after];
}

int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Adds every size, way to recompute and mapping of one schedule on a number of ranks.
class Adder {
 public:
  Adder(const PlanProblem& problem, const DeviceMappings& mappings, std::vector<Candidate>& list)
      : problem_(problem), mappings_(mappings), list_(list) {}

  void add(const ScheduleMethod& method, int width, int ranks, int stages_per_rank) {
    const PlanOptions& options = problem_.options;
    if (options.num_stages != 0 && ranks * stages_per_rank != options.num_stages) return;
    const auto& sizes = problem_.model.microbatches;
    for (int size = 0; size < static_cast<int>(sizes.size()); ++size) {
      const std::int64_t rows = std::int64_t{width} * sizes[size].rows;
      if (rows > options.largest_batch) break;
      const std::optional<int> m = least_microbatches(
          method, ranks, stages_per_rank, ceil_div(options.batch, static_cast<int>(rows)));
      if (!m || rows * *m > options.largest_batch) continue;
      Candidate candidate = {.shape = {&method, ranks, stages_per_rank, *m},
                             .width = width,
                             .size = size,
                             .rows = sizes[size].rows};
      for (const Recompute recompute : options.recompute) {
        candidate.recompute = recompute;
        if (recompute != Recompute::kBlocks || may_choose_blocks(candidate)) {
          add_mappings(candidate);
        }
      }
    }
  }

 private:
  // With fewer blocks than stages some stage has none to recompute. Where there are many, each
  // stage needs two, as cuts go through some. The copies of a stage on two ranks would have to
  // choose the same ones.
  bool may_choose_blocks(const Candidate& candidate) const {
    constexpr int kMany = 64;
    const auto blocks = static_cast<int>(problem_.model.blocks.size());
    const int stages = candidate.shape.depth();
    return stages <= (blocks > kMany ? blocks / 2 : blocks) &&
           !candidate.shape.method->is_bidirectional();
  }

  void add_mappings(Candidate& candidate) {
    for (int mapping = 0; mapping < mappings_.count(); ++mapping) {
      if (mappings_.is_repeated(mapping, candidate.shape.ranks, candidate.width)) continue;
      candidate.mapping = mapping;
      list_.push_back(candidate);
    }
  }

  const PlanProblem& problem_;
  const DeviceMappings& mappings_;
  std::vector<Candidate>& list_;
};

}  // namespace

int most_stages(const ProfiledModel& model) {
  int stages = 1;
  for (int i = 0; i + 1 < model.num_layers(); ++i) stages += may_cut(model, i);
  return stages;
}

double least_received(const ProfiledModel& model, int size) {
  const ProfiledRows& profiled = model.microbatches[size];
  std::vector<double> bytes(profiled.layers.size(), 0);
  for (const Edge& edge : profiled.edges) {
    bytes[edge.consumer] = std::max(bytes[edge.consumer], static_cast<double>(edge.bytes));
  }
  double least = kInfinity;
  for (int i = 0; i + 1 < model.num_layers(); ++i) {
    if (may_cut(model, i)) least = std::min(least, bytes[i + 1]);
  }
  return least == kInfinity ? 0 : least;
}

double least_sent(const ProfiledModel& model, int size) {
  const ProfiledRows& profiled = model.microbatches[size];
  std::vector<double> bytes(profiled.layers.size(), 0);  // to the next layer
  for (const Edge& edge : profiled.edges) {
    if (edge.consumer == edge.producer + 1) bytes[edge.producer] = static_cast<double>(edge.bytes);
  }
  double least = kInfinity;
  for (int i = 0; i + 1 < model.num_layers(); ++i) {
    if (may_cut(model, i)) least = std::min(least, bytes[i]);
  }
  return least == kInfinity ? 0 : least;
}

bool same_but_mapping(const Candidate& a, const Candidate& b) {
  return a.shape.method == b.shape.method && a.shape.ranks == b.shape.ranks &&
         a.shape.stages_per_rank == b.shape.stages_per_rank && a.width == b.width &&
         a.size == b.size && a.recompute == b.recompute;
}

std::string to_string(const Candidate& candidate) {
  const PipelineShape& shape = candidate.shape;
  std::string text =
      detail::concat(shape.method->name, ", w = ", candidate.width, ", d = ", shape.depth());
  if (shape.stages_per_rank > 1) text += detail::concat(", v = ", shape.stages_per_rank);
  return text + detail::concat(", b = ", candidate.rows, ", m = ", shape.num_microbatches,
                               ", recompute ", to_string(candidate.recompute));
}

std::vector<Candidate> candidates(const PlanProblem& problem, const DeviceMappings& mappings) {
  std::vector<Candidate> list;
  Adder adder(problem, mappings, list);
  const int devices = problem.cluster.num_devices();
  const int most = most_stages(problem.model);
  for (int width = 1; width <= std::min(devices, problem.options.largest_batch); ++width) {
    if (problem.options.width != 0 && width != problem.options.width) continue;
    for (int ranks = 1; ranks <= std::min(devices / width, most); ++ranks) {
      bool has_flushed = false;
      bool has_other = false;
      for (const std::string& name : problem.options.schedules) {
        const ScheduleMethod& method = planned_method(name);
        if (ranks == 1) {
          bool& has = method.is_flushed() ? has_flushed : has_other;
          if (has || method.is_bidirectional()) continue;
          has = true;
          adder.add(method, width, 1, 1);
        } else if (method.has_chunks) {
          for (const int v : problem.options.stages_per_rank) {
            if (std::int64_t{v} * ranks <= most) adder.add(method, width, ranks, v);
          }
        } else {
          adder.add(method, width, ranks, 1);
        }
      }
    }
  }
  return list;
}

Bounds::Bounds(const PlanProblem& problem)
    : problem_(problem), best_link_(best_link(problem.cluster.topology)) {
  const ProfiledModel& model = problem.model;
  least_slowness_ = kInfinity;
  most_slowness_ = 0;
  for (const DeviceType& type : problem.cluster.types) {
    least_slowness_ = std::min(least_slowness_, type.slowness);
    most_slowness_ = std::max(most_slowness_, type.slowness);
  }
  for (const ProfiledRows& profiled : model.microbatches) {
    Totals totals;
    for (const LayerCost& layer : profiled.layers) {
      totals.forward += layer.forward;
      totals.input_grad += layer.input_grad;
      totals.weight_grad += layer.weight_grad;
      const double all = layer.forward + layer.input_grad + layer.weight_grad;
      totals.slowest_layer = std::max(totals.slowest_layer, all);
      totals.slowest_recomputed = std::max(totals.slowest_recomputed, all + layer.forward);
    }
    const double bytes = least_sent(model, static_cast<int>(totals_.size()));
    totals.hop = bytes > 0 ? best_link_.seconds(bytes) : 0;
    totals_.push_back(totals);
  }
  for (const LayerCost& layer : model.microbatches.front().layers) {
    trained_bytes_ += layer.trained_bytes;
  }
}

double Bounds::seconds(const Candidate& candidate, double speed) const {
  const PipelineShape& shape = candidate.shape;
  const Totals& totals = totals_[candidate.size];
  const int m = shape.num_microbatches;
  const int w = candidate.width;
  const bool again = candidate.recompute == Recompute::kStages;
  const double work = totals.forward + totals.input_grad + totals.weight_grad;
  double all_reduce = 0;
  if (w > 1 && problem_.cluster.all_reduce.empty()) {
    all_reduce =
        2 * (w - 1.0) / w * trained_bytes_ * problem_.options.gradient / best_link_.bandwidth;
  }
  const double busy = m * (work + (again ? totals.forward : 0));
  double least = shape.method->is_flushed() ? (busy + all_reduce / most_slowness_) / speed
                                            : std::max(busy / speed, all_reduce / shape.ranks);
  const double layer = again ? totals.slowest_recomputed : totals.slowest_layer;
  least =
      std::max(least, least_slowness_ * m * layer * (shape.method->is_bidirectional() ? 0.5 : 1));
  return 0.999'999 * std::max(least, by_way(candidate, totals));
}

double Bounds::by_way(const Candidate& candidate, const Totals& totals) const {
  const PipelineShape& shape = candidate.shape;
  const int m = shape.num_microbatches;
  const double p = shape.ranks;
  const double halves = least_slowness_ * (totals.forward + totals.input_grad);
  const double work = halves + least_slowness_ * totals.weight_grad;
  const double hops = shape.ranks > 1 ? 2 * (p - 1) * totals.hop : 0;
  if (!shape.method->is_flushed()) {
    const double step = shape.method->is_eager() ? 2 : 1;
    return m * (work + hops) / (step * (p - 1) + 1);
  }
  if (shape.method->is_split || shape.method->has_chunks || shape.method->is_bidirectional()) {
    return halves + (shape.method->has_chunks ? 0 : hops);
  }
  const double q = 1 - 1.0 / m;
  const double share = 1 / (1 - std::pow(q, p));
  const double before = share * (p - 1 - (m > 1 ? m * q * (1 - std::pow(q, p - 1)) : 0));
  return std::max(work + hops, work * share + 2 * totals.hop * before);
}

}  // namespace pd2
