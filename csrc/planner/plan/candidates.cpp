#include "planner/plan/candidates.h"

#include "core/check.h"
#include "core/infinity.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <utility>

namespace pd2 {
namespace {

int ceil_div(int a, int b) { return (a + b - 1) / b; }

// The least of the bytes by layer over those after which the model can be cut; none: 0.
double least_at_cuts(const ProfiledModel& model, const std::vector<double>& bytes) {
  double least = kInfinity;
  for (int i = 0; i + 1 < model.num_layers(); ++i) {
    if (model.may_cut(i)) least = std::min(least, bytes[i]);
  }
  return least == kInfinity ? 0 : least;
}

// With fewer blocks than stages some stage has none to recompute. Where there are many, each stage
// needs two, as cuts go through some. The copies of a stage on two ranks would have to choose the
// same ones, and in a V the blocks of two stages run again at once.
bool may_choose_blocks(const ProfiledModel& model, const PipelineShape& shape) {
  constexpr int kMany = 64;
  const auto blocks = static_cast<int>(model.blocks.size());
  return shape.depth() <= (blocks > kMany ? blocks / 2 : blocks) && !shape.is_folded();
}

// The slowness of each replica's slowest device, by mapping; empty where all have the same.
std::vector<std::vector<double>> slowness_of_replicas(const PlanProblem& problem,
                                                      const DeviceMappings& mappings, int width,
                                                      int ranks) {
  std::vector<std::vector<double>> by_mapping(mappings.count());
  const Cluster& cluster = problem.cluster;
  if (!problem.options.unequal_replicas || width == 1 || cluster.types.size() == 1) {
    return by_mapping;
  }
  for (int mapping = 0; mapping < mappings.count(); ++mapping) {
    const DeviceGrid grid = mappings.grid(mapping, ranks, width);
    std::vector<double>& slowness = by_mapping[mapping];
    slowness.assign(width, 0);
    for (int rank = 0; rank < ranks; ++rank) {
      for (int replica = 0; replica < width; ++replica) {
        slowness[replica] =
            std::max(slowness[replica], cluster.type(grid.at(rank, replica)).slowness);
      }
    }
    if (std::ranges::min(slowness) == std::ranges::max(slowness)) slowness.clear();
  }
  return by_mapping;
}

// The fewest microbatches, of so many rows in all replicas, of which no larger share is late than
// is allowed, or as many as fit.
int least_by_late_share(const PlanOptions& options, PipelineShape shape, std::int64_t rows) {
  if (!shape.method->is_fresh) return 1;
  shape.num_microbatches = 1;
  const double fewest = std::ceil(shape.mean_delay() / options.max_late_share);
  return static_cast<int>(std::min(fewest, 1.0 * (options.largest_batch / rows)));
}

// The candidate with microbatches by the replicas' speed; none where batches would be too large.
std::optional<Candidate> by_speed(const PlanProblem& problem, Candidate candidate,
                                  const std::vector<double>& slowness) {
  PipelineShape& shape = candidate.shape;
  const ScheduleMethod& method = *shape.method;
  if (slowness.empty() || method.is_bidirectional() || shape.is_stashed()) return std::nullopt;
  const int fewest = least_by_late_share(problem.options, shape, candidate.width * candidate.rows);
  const int least = *least_microbatches(method, shape.ranks, shape.stages_per_rank, fewest);
  candidate.microbatches = microbatches_by_speed(
      slowness, least, method.microbatches_multiple_of(shape.ranks),
      ceil_div(problem.options.batch, candidate.rows), method.is_flushed() ? shape.ranks - 1 : 0);
  shape.num_microbatches = std::ranges::max(candidate.microbatches);
  if (candidate.batch() > problem.options.largest_batch) return std::nullopt;
  return candidate;
}

// Adds every size, way to recompute and mapping of one schedule on a number of ranks.
// `slowness`: of replicas, by mapping.
void add_candidates(const PlanProblem& problem, const DeviceMappings& mappings,
                    const ScheduleMethod& method, int width, int ranks, int stages_per_rank,
                    const std::vector<std::vector<double>>& slowness,
                    std::vector<Candidate>& list) {
  const PlanOptions& options = problem.options;
  if (options.num_stages != 0 && ranks * stages_per_rank != options.num_stages) return;
  const auto& sizes = problem.model.microbatches;
  for (int size = 0; size < static_cast<int>(sizes.size()); ++size) {
    const std::int64_t rows = std::int64_t{width} * sizes[size].rows;
    if (rows > options.largest_batch) break;
    const int fewest = least_by_late_share(options, {&method, ranks, stages_per_rank, 1}, rows);
    const std::optional<int> m =
        least_microbatches(method, ranks, stages_per_rank,
                           std::max(fewest, ceil_div(options.batch, static_cast<int>(rows))));
    if (!m) continue;
    const bool may_be_equal = rows * *m <= options.largest_batch;
    const PipelineShape shape = {&method, ranks, stages_per_rank, *m};
    for (const Recompute recompute : options.recompute) {
      if (recompute == Recompute::kBlocks && !may_choose_blocks(problem.model, shape)) continue;
      for (int mapping = 0; mapping < mappings.count(); ++mapping) {
        if (mappings.is_repeated(mapping, ranks, width)) continue;
        const Candidate equal = {shape, width, size, sizes[size].rows, recompute, mapping};
        if (may_be_equal) list.push_back(equal);
        if (auto other = by_speed(problem, equal, slowness[mapping])) {
          list.push_back(*std::move(other));
        }
      }
    }
  }
}

}  // namespace

int Candidate::batch() const {
  const int m = microbatches.empty() ? width * shape.num_microbatches
                                     : std::accumulate(microbatches.begin(), microbatches.end(), 0);
  return rows * m;
}

// In the end all replicas take about as long as with real numbers: (total + w more) / sum of
// speeds.
std::vector<int> microbatches_by_speed(const std::vector<double>& slowness, int least,
                                       int multiple_of, int total, int more) {
  const int first = ceil_div(least, multiple_of) * multiple_of;
  double speeds = 0;
  for (const double each : slowness) speeds += 1 / each;
  const double seconds = (total + static_cast<double>(slowness.size()) * more) / speeds;
  std::vector<int> numbers;
  int sum = 0;
  for (const double each : slowness) {
    const auto m = static_cast<int>((seconds / each - more) / multiple_of) * multiple_of;
    numbers.push_back(std::max(first, m));
    sum += numbers.back();
  }
  const auto seconds_with = [&](std::size_t replica, int further) {
    return slowness[replica] * (numbers[replica] + further + more);
  };
  std::vector<std::size_t> replicas(slowness.size());
  std::iota(replicas.begin(), replicas.end(), 0);
  // Replicas that must have the least may have left the others too many.
  while (sum - multiple_of >= total) {
    const auto takes = [&](std::size_t i) { return numbers[i] > first ? seconds_with(i, 0) : -1; };
    const std::size_t slowest = *std::ranges::max_element(replicas, {}, takes);
    if (numbers[slowest] == first) break;
    numbers[slowest] -= multiple_of;
    sum -= multiple_of;
  }
  while (sum < total) {
    const auto takes = [&](std::size_t i) { return seconds_with(i, multiple_of); };
    numbers[*std::ranges::min_element(replicas, {}, takes)] += multiple_of;
    sum += multiple_of;
  }
  return numbers;
}

int most_stages(const ProfiledModel& model) {
  int stages = 1;
  for (int i = 0; i + 1 < model.num_layers(); ++i) stages += model.may_cut(i);
  return stages;
}

double least_received(const ProfiledModel& model, int size) {
  std::vector<double> bytes(model.num_layers(), 0);  // that the layer after each one reads
  for (const Edge& edge : model.microbatches[size].edges) {
    double& received = bytes[edge.consumer - 1];
    received = std::max(received, static_cast<double>(edge.bytes));
  }
  return least_at_cuts(model, bytes);
}

double least_sent(const ProfiledModel& model, int size) {
  std::vector<double> bytes(model.num_layers(), 0);  // to the next layer
  for (const Edge& edge : model.microbatches[size].edges) {
    if (edge.consumer == edge.producer + 1) bytes[edge.producer] = static_cast<double>(edge.bytes);
  }
  return least_at_cuts(model, bytes);
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
  const std::vector<int>& of_each = candidate.microbatches;
  const int fewest = of_each.empty() ? shape.num_microbatches : std::ranges::min(of_each);
  const std::string from =
      fewest < shape.num_microbatches ? detail::concat(fewest, " to ") : std::string();
  return text + detail::concat(", b = ", candidate.rows, ", m = ", from, shape.num_microbatches,
                               ", recompute ", to_string(candidate.recompute));
}

std::vector<Candidate> candidates(const PlanProblem& problem, const DeviceMappings& mappings) {
  std::vector<Candidate> list;
  std::vector<std::vector<double>> slowness;
  const auto add = [&](const ScheduleMethod& method, int width, int ranks, int stages_per_rank) {
    add_candidates(problem, mappings, method, width, ranks, stages_per_rank, slowness, list);
  };
  const int devices = problem.cluster.num_devices();
  const int most = most_stages(problem.model);
  for (int width = 1; width <= std::min(devices, problem.options.largest_batch); ++width) {
    if (problem.options.width != 0 && width != problem.options.width) continue;
    for (int ranks = 1; ranks <= std::min(devices / width, most); ++ranks) {
      slowness = slowness_of_replicas(problem, mappings, width, ranks);
      bool has_flushed = false;
      bool has_other = false;
      for (const std::string& name : problem.options.schedules) {
        const ScheduleMethod& method = planned_method(name);
        if (ranks == 1 && method.weights != Weights::kStashed) {
          bool& has = method.is_flushed() ? has_flushed : has_other;
          if (has || method.is_bidirectional() || method.is_v()) continue;
          has = true;
          add(method, width, 1, 1);
        } else if (method.is_v()) {
          if (2 * ranks <= most) add(method, width, ranks, 2);
        } else if (method.has_chunks) {
          for (const int v : problem.options.stages_per_rank) {
            if (std::int64_t{v} * ranks <= most) add(method, width, ranks, v);
          }
        } else {
          add(method, width, ranks, 1);
        }
      }
    }
  }
  return list;
}

Bounds::Bounds(const PlanProblem& problem)
    : problem_(problem),
      least_slowness_(problem.cluster.least_slowness()),
      best_link_(best_link(problem.cluster.topology)) {
  const ProfiledModel& model = problem.model;
  const std::vector<DeviceType>& types = problem.cluster.types;
  most_slowness_ = std::ranges::max_element(types, {}, &DeviceType::slowness)->slowness;
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
        2 * (w - 1.0) / w * trained_bytes_ * problem_.options.summed() / best_link_.bandwidth;
  }
  const double busy = m * (work + (again ? totals.forward : 0));
  double least = shape.method->is_flushed() ? (busy + all_reduce / most_slowness_) / speed
                                            : std::max(busy / speed, all_reduce / shape.ranks);
  const double layer = again ? totals.slowest_recomputed : totals.slowest_layer;
  least = std::max(least, least_slowness_ * shape.microbatches_of_copy() * layer);
  return 0.999'999 * std::max(least, by_way(candidate, totals));
}

double Bounds::by_way(const Candidate& candidate, const Totals& totals) const {
  const PipelineShape& shape = candidate.shape;
  const int m = shape.num_microbatches;
  const double p = shape.ranks;
  const double halves = least_slowness_ * (totals.forward + totals.input_grad);
  const double work = halves + least_slowness_ * totals.weight_grad;
  const double hops = shape.ranks > 1 ? 2 * (p - 1) * totals.hop : 0;
  if (!shape.method->is_flushed() && shape.method->is_v()) {
    // From a microbatch's first F to its last I, the turn between two stages of one rank is free.
    return m * (halves + 4 * (p - 1) * totals.hop) /
           most_on_round_trip(shape.ranks, shape.method->v);
  }
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
