#include "planner/partition/split_costs.h"

#include <algorithm>
#include <cmath>
#include <tuple>

namespace pd2 {
namespace {

// Keeps the sum of everything below 2^61.
constexpr int kSumBits = 60;

// Turns counts by piece into where each piece's items begin.
void count_to_begin(std::vector<int>& counts) {
  int sum = 0;
  for (int& count : counts) sum += std::exchange(count, sum);
}

// The values of problem.edges and problem.values. Edges of one producer with several sizes become
// several values, each of what the larger ones add.
std::vector<Value> all_values(const StageSplitProblem& problem) {
  // Sorts by producer, the largest first; of each producer and consumer it keeps the largest.
  std::vector<Edge> edges = problem.edges;
  std::ranges::sort(edges, {}, [](const Edge& edge) {
    return std::tuple(edge.producer, edge.consumer, -edge.bytes);
  });
  const auto repeated = std::ranges::unique(
      edges, {}, [](const Edge& edge) { return std::pair(edge.producer, edge.consumer); });
  edges.erase(repeated.begin(), repeated.end());
  std::ranges::stable_sort(edges, {},
                           [](const Edge& edge) { return std::pair(edge.producer, -edge.bytes); });
  std::vector<Value> values = problem.values;
  std::vector<int> readers;  // of at least an edge's bytes
  for (std::size_t i = 0; i < edges.size(); ++i) {
    const Edge& edge = edges[i];
    readers.push_back(edge.consumer);
    const bool is_smallest = i + 1 == edges.size() || edges[i + 1].producer != edge.producer;
    if (!is_smallest && edges[i + 1].bytes == edge.bytes) continue;
    const double added = static_cast<double>(edge.bytes - (is_smallest ? 0 : edges[i + 1].bytes));
    values.push_back(
        {edge.producer, readers, added,
         2 * (added * problem.seconds_per_byte + (is_smallest ? problem.seconds_per_value : 0))});
    if (is_smallest) readers.clear();
  }
  return values;
}

}  // namespace

SplitCosts::SplitCosts(const StageSplitProblem& problem) : rules_(problem.stages) {
  for (const StageMemoryRule& rule : rules_) {
    const auto known = std::find(slownesses_.begin(), slownesses_.end(), rule.slowness);
    slowness_of_.push_back(static_cast<int>(known - slownesses_.begin()));
    if (known == slownesses_.end()) slownesses_.push_back(rule.slowness);
  }
  const int n = static_cast<int>(problem.layers.size());
  for (int i = 0; i < n; ++i) {
    if (i == 0 || problem.can_cut.empty() || problem.can_cut[i - 1]) first_layers_.push_back(i);
    piece_of_.push_back(static_cast<int>(first_layers_.size()) - 1);
  }
  first_layers_.push_back(n);

  // The scale. Summed relative to the largest one: the sum of finite costs need not be finite.
  const std::vector<Value> values = all_values(problem);
  double largest = 0;
  for (const LayerCost& layer : problem.layers) {
    largest = std::max({largest, layer.forward, layer.input_grad, layer.weight_grad});
  }
  for (const Value& value : values) largest = std::max(largest, value.seconds);
  if (largest > 0) {
    const double slowest = *std::max_element(slownesses_.begin(), slownesses_.end());
    const int exponent = std::ilogb(largest);
    double sum = 0;
    for (const LayerCost& layer : problem.layers) {
      sum += 2 * std::ldexp(layer.forward, -exponent) + std::ldexp(layer.input_grad, -exponent) +
             std::ldexp(layer.weight_grad, -exponent);
    }
    sum *= std::max(1.0, slowest);
    for (const Value& value : values) {  // each consumer may be on a stage of its own
      sum += static_cast<double>(1 + value.consumers.size()) * std::ldexp(value.seconds, -exponent);
    }
    exponent_ = kSumBits - 1 - std::ilogb(sum) - exponent;
  }
  add_layers(problem);
  add_values(values);
}

Cost SplitCosts::scaled(double seconds) const {
  return static_cast<Cost>(std::llround(std::ldexp(seconds, exponent_)));
}

double SplitCosts::seconds(Cost cost) const {
  return std::ldexp(static_cast<double>(cost), -exponent_);
}

void SplitCosts::add_layers(const StageSplitProblem& problem) {
  const int size = num_pieces() + 1;
  compute_.assign(size, 0);
  trained_.assign(size, 0);
  frozen_.assign(size, 0);
  activations_.assign(size, 0);
  for (std::size_t i = 0; i < problem.layers.size(); ++i) {
    const LayerCost& layer = problem.layers[i];
    const int after = piece_of_[i] + 1;
    compute_[after] += (problem.recompute ? 2 : 1) * scaled(layer.forward) +
                       scaled(layer.input_grad) + scaled(layer.weight_grad);
    trained_[after] += layer.trained_bytes;
    frozen_[after] += layer.parameter_bytes - layer.trained_bytes;
    activations_[after] += layer.activation_bytes;
  }
  for (int i = 1; i < size; ++i) {
    compute_[i] += compute_[i - 1];
    trained_[i] += trained_[i - 1];
    frozen_[i] += frozen_[i - 1];
    activations_[i] += activations_[i - 1];
  }
}

void SplitCosts::add_values(const std::vector<Value>& values) {
  const int n = num_pieces();
  std::vector<std::pair<int, Link>> links;  // with the consumer's piece
  std::vector<std::pair<int, std::pair<int, Cost>>> ends;
  made_.assign(n, 0);
  for (const Value& value : values) {
    const Cost cost = scaled(value.seconds);
    int previous = piece_of_[value.producer];
    std::vector<int> consumers = value.consumers;
    std::sort(consumers.begin(), consumers.end());
    if (consumers.empty() || piece_of_[consumers.back()] == previous) continue;
    made_[previous] += cost;
    ends.push_back({piece_of_[consumers.back()], {previous, cost}});
    for (const int consumer : consumers) {
      const int piece = piece_of_[consumer];
      if (piece == previous) continue;
      links.push_back({piece, {previous, cost, Received::of(value)}});
      previous = piece;
    }
  }

  links_at_.assign(n + 1, 0);
  ends_at_.assign(n + 1, 0);
  links_.resize(links.size());
  ends_.resize(ends.size());
  for (const auto& link : links) ++links_at_[link.first];
  for (const auto& end : ends) ++ends_at_[end.first];
  count_to_begin(links_at_);
  count_to_begin(ends_at_);
  std::vector<int> next_link = links_at_;
  std::vector<int> next_end = ends_at_;
  for (const auto& [piece, link] : links) links_[next_link[piece]++] = link;
  for (const auto& [piece, end] : ends) ends_[next_end[piece]++] = end;

  // A link crosses the positions previous + 1 .. piece; after the last piece nothing does.
  crossing_.assign(n + 2, {});
  for (const auto& [piece, link] : links) {
    crossing_[link.previous + 1] += link.received;
    crossing_[piece + 1] += -link.received;
    const Received& received = link.received;
    has_shared_ = has_shared_ || received.kept + received.trained + received.frozen > 0;
  }
  for (int i = 1; i <= n; ++i) crossing_[i] += crossing_[i - 1];
}

Cost SplitCosts::compute(double slowness, int first, int end) const {
  const Cost cost = compute(first, end);
  // Not through a double where that could round.
  return slowness == 1 ? cost : std::llround(slowness * static_cast<double>(cost));
}

Messages SplitCosts::messages(int first, int end) const {
  Messages messages;
  for (int piece = first; piece < end; ++piece) extend(messages, first, piece);
  return messages;
}

Cost SplitCosts::cost(int stage, int first, int end) const {
  return compute(rules_[stage].slowness, first, end) + messages(first, end).cost();
}

}  // namespace pd2
