#include "core/plan/sums.h"

#include "core/plan/candidates.h"

#include <algorithm>
#include <limits>
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

std::vector<LayerCost> prefix_sums(const std::vector<LayerCost>& layers) {
  LayerCost sum;
  std::vector<LayerCost> sums = {sum};
  for (const LayerCost& layer : layers) {
    sum.forward += layer.forward;
    sum.input_grad += layer.input_grad;
    sum.weight_grad += layer.weight_grad;
    sum.activation_bytes += layer.activation_bytes;
    sum.parameter_bytes += layer.parameter_bytes;
    sum.trained_bytes += layer.trained_bytes;
    sums.push_back(sum);
  }
  return sums;
}

}  // namespace

LayerCost LayerSums::of(int first, int end) const {
  const LayerCost& a = before[first];
  const LayerCost& b = before[end];
  return {.forward = b.forward - a.forward,
          .input_grad = b.input_grad - a.input_grad,
          .weight_grad = b.weight_grad - a.weight_grad,
          .activation_bytes = b.activation_bytes - a.activation_bytes,
          .parameter_bytes = b.parameter_bytes - a.parameter_bytes,
          .trained_bytes = b.trained_bytes - a.trained_bytes};
}

LayerSums sums_of(const ProfiledModel& model, int size) {
  const ProfiledRows& profiled = model.microbatches[size];
  LayerSums sums;
  sums.before = prefix_sums(profiled.layers);
  sums.edges = profiled.edges;
  std::ranges::sort(sums.edges, {},
                    [](const Edge& e) { return std::pair(e.producer, e.consumer); });
  sums.seconds_per_saved_byte = std::numeric_limits<double>::infinity();
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
