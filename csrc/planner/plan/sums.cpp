#include "planner/plan/sums.h"

#include "core/infinity.h"
#include "planner/plan/candidates.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace pd2 {
namespace {

// The bytes of the values from before a block that its layers read. The edges are sorted.
double read_by_block(const std::vector<Edge>& edges, const Block& block) {
  double sum = 0;
  for (std::size_t i = 0; i < edges.size();) {
    const int producer = edges[i].producer;
    std::int64_t bytes = 0;
    for (; i < edges.size() && edges[i].producer == producer; ++i) {
      if (edges[i].consumer >= block.first && edges[i].consumer < block.end) {
        bytes = std::max(bytes, edges[i].bytes);
      }
    }
    if (producer < block.first) sum += static_cast<double>(bytes);
  }
  return sum;
}

}  // namespace

LayerCost LayerSums::of(int first, int end) const {
  LayerCost sum;
  for (const auto& [_, cost] : kLayerCosts) sum.*cost = before[end].*cost - before[first].*cost;
  return sum;
}

LayerSums sums_of(const ProfiledModel& model, int size) {
  const ProfiledRows& profiled = model.microbatches[size];
  LayerSums sums;
  LayerCost sum_before;
  sums.before.push_back(sum_before);
  for (const LayerCost& layer : profiled.layers) {
    for (const auto& [_, cost] : kLayerCosts) sum_before.*cost += layer.*cost;
    sums.before.push_back(sum_before);
  }
  sums.edges = profiled.edges;
  std::ranges::sort(sums.edges, {},
                    [](const Edge& e) { return std::pair(e.producer, e.consumer); });
  sums.seconds_per_saved_byte = kInfinity;
  for (const Block& block : model.blocks) {
    const LayerCost& sum = sums.blocks.emplace_back(sums.of(block.first, block.end));
    const double inputs = sums.block_inputs.emplace_back(read_by_block(sums.edges, block));
    const double saved = sum.activation_bytes - inputs;
    if (saved > 0) {
      sums.seconds_per_saved_byte = std::min(sums.seconds_per_saved_byte, sum.forward / saved);
    }
  }
  sums.least_received = least_received(model, size);
  if (!model.can_cut.empty()) {
    // Messages are looked for very often, and most edges are within what is never cut.
    std::vector<int> piece_of = {0};
    for (const bool can_cut : model.can_cut) piece_of.push_back(piece_of.back() + can_cut);
    std::erase_if(sums.edges,
                  [&](const Edge& e) { return piece_of[e.producer] == piece_of[e.consumer]; });
  }
  return sums;
}

std::vector<StageMessage> messages_between(const LayerSums& sums,
                                           const std::vector<int>& stage_of) {
  const std::vector<Edge>& edges = sums.edges;
  std::vector<StageMessage> values;
  for (std::size_t i = 0; i < edges.size();) {
    const int producer = edges[i].producer;
    const int stage = stage_of[edges[i].consumer];
    std::int64_t bytes = 0;
    for (;
         i < edges.size() && edges[i].producer == producer && stage_of[edges[i].consumer] == stage;
         ++i) {
      bytes = std::max(bytes, edges[i].bytes);
    }
    if (stage_of[producer] != stage) {
      values.push_back({stage_of[producer], stage, static_cast<double>(bytes)});
    }
  }
  const auto ends = [](const StageMessage& message) { return std::pair(message.from, message.to); };
  std::ranges::stable_sort(values, {}, ends);
  std::vector<StageMessage> messages;
  for (const StageMessage& value : values) {
    if (messages.empty() || ends(messages.back()) != ends(value)) {
      messages.push_back(value);
    } else {
      messages.back().bytes += value.bytes;
    }
  }
  return messages;
}

std::vector<std::int64_t> cut_bytes(std::vector<Edge> edges, int num_layers) {
  // Per producer from its farthest consumer to its nearest: at each cut the value counts with the
  // largest size among the edges that still cross.
  std::ranges::sort(edges, {}, [](const Edge& e) { return std::pair(e.producer, -e.consumer); });
  std::vector<std::int64_t> bytes(num_layers, 0);  // at first: those at cut i minus at cut i - 1
  for (std::size_t i = 0; i < edges.size();) {
    const int producer = edges[i].producer;
    std::int64_t largest = 0;
    for (; i < edges.size() && edges[i].producer == producer; ++i) {
      // The edge crosses the cuts producer .. consumer - 1, and adds what exceeds the farther ones.
      const std::int64_t more = std::max<std::int64_t>(0, edges[i].bytes - largest);
      bytes[producer] += more;
      bytes[edges[i].consumer] -= more;
      largest += more;
    }
  }
  std::partial_sum(bytes.begin(), bytes.end(), bytes.begin());
  if (num_layers > 0) bytes.pop_back();
  return bytes;
}

std::vector<Received> shared_bytes(const std::vector<Value>& values,
                                   const std::vector<int>& stage_of, int num_stages) {
  std::vector<Received> bytes(num_stages);
  for (const Value& value : values) {
    int stage = stage_of[value.producer];
    for (const int consumer : value.consumers) {
      if (stage_of[consumer] == stage) continue;
      stage = stage_of[consumer];
      bytes[stage] += Received::of(value);
    }
  }
  return bytes;
}

}  // namespace pd2
