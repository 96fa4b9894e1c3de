// The costs of any stage [first, end) of a StageSplitProblem, as the searches for splits need them.

#pragma once

#include "planner/partition/stage_split.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace pd2 {

// Seconds as integers: sums are exact and equal sums compare equal, which breaking ties needs.
using Cost = std::int64_t;
inline constexpr Cost kInfiniteCost = std::numeric_limits<Cost>::max() / 4;

// Bytes that come from earlier stages, or that earlier stages have, too.
struct Received {
  double all = 0;
  double kept = 0;  // for the backward
  double trained = 0;
  double frozen = 0;

  // The bytes of a stage with a layer that takes the value.
  static Received of(const Value& value) {
    return {value.bytes, value.kept_bytes, value.trained_bytes, value.frozen_bytes};
  }
  Received& operator+=(const Received& other) {
    all += other.all;
    kept += other.kept;
    trained += other.trained;
    frozen += other.frozen;
    return *this;
  }
  Received operator-() const { return {-all, -kept, -trained, -frozen}; }
};

// The bytes that one stage holds, or several stages of one rank. Only one stage runs again at a
// time, so the largest counts.
struct HeldBytes {
  double always = 0;
  double again = 0;

  double all() const { return always + again; }
  HeldBytes operator+(const HeldBytes& other) const {
    return {always + other.always, std::max(again, other.again)};
  }
};

// The messages of a stage.
struct Messages {
  Cost entering = 0;
  Cost leaving = 0;
  Received received;

  Cost cost() const { return entering + leaving; }
};

// Layers that must not be separated are one piece here: every position between pieces is a cut.
class SplitCosts {
 public:
  explicit SplitCosts(const StageSplitProblem& problem);

  int num_pieces() const { return static_cast<int>(first_layers_.size()) - 1; }
  int num_stages() const { return static_cast<int>(rules_.size()); }
  int first_layer(int piece) const { return first_layers_[piece]; }
  // The stages' different slownesses, and which one stage k has.
  const std::vector<double>& slownesses() const { return slownesses_; }
  int slowness_of(int stage) const { return slowness_of_[stage]; }
  const StageMemoryRule& rule(int stage) const { return rules_[stage]; }

  Cost compute(int first, int end) const { return compute_[end] - compute_[first]; }
  Cost compute(double slowness, int first, int end) const;
  double seconds(Cost cost) const;  // as it was before the scaling

  // Makes the messages of [first, piece) those of [first, piece + 1). A stage without pieces has
  // none. Never makes less enter.
  void extend(Messages& messages, int first, int piece) const {
    for (int i = links_at_[piece]; i < links_at_[piece + 1]; ++i) {
      if (links_[i].previous >= first) continue;
      messages.entering += links_[i].cost;
      messages.received += links_[i].received;
    }
    messages.leaving += made_[piece];
    for (int i = ends_at_[piece]; i < ends_at_[piece + 1]; ++i) {
      if (ends_[i].first >= first) messages.leaving -= ends_[i].second;
    }
  }
  Messages messages(int first, int end) const;
  Cost cost(int stage, int first, int end) const;  // compute and messages

  // Inputs that are kept to run the forward again are those that its layers keep.
  double bytes(const StageMemoryRule& rule, int first, int end, const Received& received) const {
    return rule.trained * (trained_[end] - trained_[first] + received.trained) +
           rule.frozen * (frozen_[end] - frozen_[first] + received.frozen) +
           rule.activations * (activations_[end] - activations_[first]) +
           (rule.inputs > 0 ? rule.inputs * received.all : rule.activations * received.kept);
  }
  // bytes() in its parts: with recompute the activations run again.
  HeldBytes held(const StageMemoryRule& rule, int first, int end, const Received& received) const {
    const double activations = rule.activations * (activations_[end] - activations_[first]);
    const double again = rule.inputs > 0 ? activations : 0;
    return {bytes(rule, first, end, received) - again, again};
  }
  // The bytes of the values that are made before the position and read after it.
  const Received& crossing(int position) const { return crossing_[position]; }
  // Whether the memory by this rule depends on what a stage receives.
  bool counts_received(const StageMemoryRule& rule) const { return rule.inputs > 0 || has_shared_; }

 private:
  // A consumer of a value, and its consumer before (for the first one: its producer). A stage
  // that the first is in and the second comes before is one that the value enters.
  struct Link {
    int previous = 0;
    Cost cost = 0;
    Received received;
  };

  void add_layers(const StageSplitProblem& problem);
  void add_values(const std::vector<Value>& values);
  Cost scaled(double seconds) const;

  std::vector<StageMemoryRule> rules_;
  std::vector<double> slownesses_;
  std::vector<int> slowness_of_;
  std::vector<int> first_layers_;  // by piece, and the number of layers
  std::vector<int> piece_of_;      // by layer
  int exponent_ = 0;               // of the power of two that makes seconds integers
  // Sums over the pieces before each position.
  std::vector<Cost> compute_;
  std::vector<double> trained_;
  std::vector<double> frozen_;
  std::vector<double> activations_;
  // Values: links by the consumer's piece, costs by the producer's, (producer, cost) by that of the
  // last consumer.
  std::vector<int> links_at_;
  std::vector<Link> links_;
  std::vector<Cost> made_;
  std::vector<int> ends_at_;
  std::vector<std::pair<int, Cost>> ends_;
  std::vector<Received> crossing_;
  bool has_shared_ = false;  // tensors kept or parameters used by several layers
};

}  // namespace pd2
