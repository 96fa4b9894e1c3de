// Problems of cutting layers into stages, what any stage of them costs by definition, and the best
// split by trying all. Shares no code with the partitioner.

#pragma once

#include "planner/partition/stage_split.h"

#include <algorithm>
#include <map>
#include <random>
#include <vector>

namespace pd2::testing {

struct StageByDefinition {
  double compute = 0;
  double messages = 0;
  double entering_bytes = 0;
  double kept_bytes = 0;  // what stages before keep, too
  double trained_bytes = 0;
  double frozen_bytes = 0;

  double seconds() const { return compute + messages; }
};

inline StageByDefinition stage_by_definition(const StageSplitProblem& problem, double slowness,
                                             int first, int end) {
  StageByDefinition stage;
  for (int i = first; i < end; ++i) {
    const LayerCost& layer = problem.layers[i];
    stage.compute += layer.forward + layer.input_grad + layer.weight_grad;
    if (problem.recompute) stage.compute += layer.forward;
  }
  stage.compute *= slowness;
  std::map<int, double> entering;  // bytes by producer
  std::map<int, double> leaving;
  for (const Edge& edge : problem.edges) {
    const bool makes = first <= edge.producer && edge.producer < end;
    const bool reads = first <= edge.consumer && edge.consumer < end;
    if (makes == reads) continue;
    double& bytes = (reads ? entering : leaving)[edge.producer];
    bytes = std::max(bytes, static_cast<double>(edge.bytes));
  }
  for (const auto* values : {&entering, &leaving}) {
    for (const auto& [producer, bytes] : *values) {
      stage.messages += 2 * (bytes * problem.seconds_per_byte + problem.seconds_per_value);
    }
  }
  for (const auto& [producer, bytes] : entering) stage.entering_bytes += bytes;
  for (const Value& value : problem.values) {
    const bool makes = first <= value.producer && value.producer < end;
    bool reads = false;
    bool read_elsewhere = false;
    for (const int consumer : value.consumers) {
      (first <= consumer && consumer < end ? reads : read_elsewhere) = true;
    }
    if (makes ? read_elsewhere : reads) stage.messages += value.seconds;
    if (!makes && reads) stage.entering_bytes += value.bytes;
    if (!makes && reads) {
      stage.kept_bytes += value.kept_bytes;
      stage.trained_bytes += value.trained_bytes;
      stage.frozen_bytes += value.frozen_bytes;
    }
  }
  return stage;
}

inline double bytes_by_definition(const StageSplitProblem& problem, const StageMemoryRule& rule,
                                  int first, int end, const StageByDefinition& stage) {
  double bytes = rule.inputs * stage.entering_bytes + rule.trained * stage.trained_bytes +
                 rule.frozen * stage.frozen_bytes;
  if (rule.inputs == 0) bytes += rule.activations * stage.kept_bytes;
  for (int i = first; i < end; ++i) {
    const LayerCost& layer = problem.layers[i];
    bytes += rule.trained * layer.trained_bytes +
             rule.frozen * (layer.parameter_bytes - layer.trained_bytes) +
             rule.activations * layer.activation_bytes;
  }
  return bytes;
}

// Everything about every stage k over the layers first .. end - 1.
class AllStages {
 public:
  explicit AllStages(const StageSplitProblem& problem)
      : size_(problem.layers.size() + 1),
        messages_(size_ * size_),
        seconds_(problem.stages.size(), messages_),
        bytes_(seconds_) {
    const int n = static_cast<int>(problem.layers.size());
    for (int a = 0; a < n; ++a) {
      for (int b = a + 1; b <= n; ++b) {
        const StageByDefinition stage = stage_by_definition(problem, 1, a, b);
        messages_[index(a, b)] = stage.messages;
        for (std::size_t k = 0; k < problem.stages.size(); ++k) {
          const StageMemoryRule& rule = problem.stages[k];
          seconds_[k][index(a, b)] = stage.compute * rule.slowness + stage.messages;
          bytes_[k][index(a, b)] = bytes_by_definition(problem, rule, a, b, stage);
        }
      }
    }
  }

  double messages(int a, int b) const { return messages_[index(a, b)]; }
  double seconds(int k, int a, int b) const { return seconds_[k][index(a, b)]; }
  double bytes(int k, int a, int b) const { return bytes_[k][index(a, b)]; }

 private:
  std::size_t index(int a, int b) const { return a * size_ + b; }

  std::size_t size_;
  std::vector<double> messages_;
  std::vector<std::vector<double>> seconds_;
  std::vector<std::vector<double>> bytes_;
};

// What a rank's stages hold together: of what runs again the largest stage's.
struct RankBytes {
  double held = 0;
  double again = 0;

  void add(const StageSplitProblem& problem, const AllStages& stages, int k, int a, int b) {
    const StageMemoryRule& rule = problem.stages[k];
    double own = 0;
    for (int i = a; i < b && rule.inputs > 0; ++i) {
      own += rule.activations * problem.layers[i].activation_bytes;
    }
    held += stages.bytes(k, a, b) - own;
    again = std::max(again, own);
  }
  double all() const { return held + again; }
};

// Calls `each(first layers)` for every split of the layers into the problem's stages.
template <typename Each>
void for_each_split(const StageSplitProblem& problem, Each&& each) {
  const int n = static_cast<int>(problem.layers.size());
  for (unsigned cuts = 0; cuts < 1u << (n - 1); ++cuts) {
    std::vector<int> firsts = {0};
    bool legal = true;
    for (int i = 0; i < n - 1; ++i) {
      if ((cuts >> i & 1) == 0) continue;
      firsts.push_back(i + 1);
      legal = legal && (problem.can_cut.empty() || problem.can_cut[i]);
    }
    if (legal && firsts.size() == problem.stages.size()) each(firsts);
  }
}

// Calls `each(k, first, end)` for every stage of a split.
template <typename Each>
void for_each_stage(const StageSplitProblem& problem, const std::vector<int>& firsts, Each&& each) {
  for (std::size_t k = 0; k < firsts.size(); ++k) {
    const int n = static_cast<int>(problem.layers.size());
    each(static_cast<int>(k), firsts[k], k + 1 < firsts.size() ? firsts[k + 1] : n);
  }
}

// Small whole numbers: sums are exact, ties are many.
inline StageSplitProblem random_problem(std::mt19937& random, int most_layers, int most_stages) {
  const auto below = [&](int n) { return static_cast<int>(random() % n); };
  StageSplitProblem problem;
  const int n = 1 + below(most_layers);
  const int largest = below(3) == 0 ? 2 : 20;
  for (int i = 0; i < n; ++i) {
    LayerCost layer;
    layer.forward = below(largest + 1);
    layer.input_grad = below(largest + 1);
    layer.weight_grad = below(largest + 1);
    layer.activation_bytes = below(20);
    layer.parameter_bytes = below(20);
    layer.trained_bytes = below(static_cast<int>(layer.parameter_bytes) + 1);
    problem.layers.push_back(layer);
  }
  if (below(4) == 0) problem.layers[below(n)].forward = 1000;
  const bool one_size = below(2) == 0;
  for (int i = 0; i + 1 < n; ++i) problem.edges.push_back({i, i + 1, one_size ? 4 : below(10)});
  const int num_skips = n > 1 ? below(2 * n) : 0;
  for (int i = 0; i < num_skips; ++i) {
    const int producer = below(n - 1);
    problem.edges.push_back(
        {producer, producer + 1 + below(n - 1 - producer), one_size ? 4 : below(10)});
  }
  for (int i = n > 1 ? below(4) : 0; i > 0; --i) {
    Value value = {below(n - 1), {}, 1.0 * below(10), 1.0 * below(10), 1.0 * below(10)};
    if (below(2) == 0) (below(2) == 0 ? value.trained_bytes : value.frozen_bytes) = below(10);
    for (int reader = 1 + below(3); reader > 0; --reader) {
      value.consumers.push_back(value.producer + 1 + below(n - 1 - value.producer));
    }
    problem.values.push_back(value);
  }
  const bool often_cut = below(2) == 0;
  for (int i = 0; i + 1 < n; ++i) problem.can_cut.push_back(often_cut || below(3) > 0);
  problem.seconds_per_byte = below(3);
  problem.seconds_per_value = below(3);
  problem.recompute = below(2) == 0;
  const int d = 1 + below(std::min(n, most_stages));
  const bool same_devices = below(2) == 0;
  const double tightness = 0.5 + 0.25 * below(8);
  double total = 0;
  for (const LayerCost& layer : problem.layers) {
    total += 2 * layer.parameter_bytes + layer.activation_bytes * (1 + 0.3 * d);
  }
  const bool limited = below(4) > 0;
  for (int k = 0; k < d; ++k) {
    StageMemoryRule rule;
    rule.trained = 1 + below(3);
    rule.activations = problem.recompute ? 1 : d - k;
    rule.inputs = problem.recompute ? d - k : 0;
    if (limited) rule.limit = tightness * total / d * (same_devices ? 1 : 0.5 + 0.25 * below(4));
    if (!same_devices) rule.slowness = 0.5 * (1 + below(3));
    problem.stages.push_back(rule);
  }
  return problem;
}

}  // namespace pd2::testing
