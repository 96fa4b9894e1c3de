// The messages that the actions of a list send and consume.

#pragma once

#include "core/floor.h"
#include "core/schedule/schedule.h"

#include <algorithm>
#include <compare>
#include <cstddef>
#include <vector>

namespace pd2 {

// A connection between two stages of the model: values go `from` -> `to`, their gradients back.
struct StageEdge {
  int from = 0;
  int to = 0;
};

// A message, as its receiver knows it: values if `from` < `to`, gradients otherwise. `to` consumes
// it in its F, or its B (I), of the microbatch, which counts as the list's actions do.
struct Receive {
  int from = 0;  // the schedule's stages
  int to = 0;
  int microbatch = 0;

  auto operator<=>(const Receive&) const = default;
};

// The messages of all actions, by number. A channel is one direction of an edge of one pipeline.
class ListMessages {
 public:
  ListMessages(const Schedule& schedule, const std::vector<StageEdge>& edges, int lowest)
      : num_microbatches_(schedule.num_microbatches),
        lowest_(lowest),
        span_(schedule.num_microbatches - lowest),
        sent_forward_(schedule.num_stages),
        sent_backward_(schedule.num_stages),
        received_forward_(schedule.num_stages),
        received_backward_(schedule.num_stages) {
    for (int stage = 0; stage < schedule.num_stages; stage += schedule.depth()) {
      for (const StageEdge& edge : edges) {
        const int from = stage + edge.from;
        const int to = stage + edge.to;
        if (schedule.placement[from] == schedule.placement[to]) continue;
        add_channel(from, to, sent_forward_, received_forward_);
        add_channel(to, from, sent_backward_, received_backward_);
      }
    }
  }

  std::size_t size() const { return channels_.size() * span_; }

  Receive operator[](int message) const {
    Receive receive = channels_[message / span_];
    receive.microbatch = message % span_ + lowest_;
    return receive;
  }

  // Whether an action may send several messages, or consume them.
  bool come_together() const {
    const auto is_several = [](const std::vector<int>& channels) { return channels.size() > 1; };
    return std::ranges::any_of(sent_forward_, is_several) ||
           std::ranges::any_of(sent_backward_, is_several);
  }

  // The same for the messages of all batches that have one place in their batch.
  std::size_t num_places() const { return channels_.size() * num_microbatches_; }
  std::size_t place(int message) const {
    return message / span_ * num_microbatches_ +
           floor_mod((*this)[message].microbatch, num_microbatches_);
  }

  // Calls use(message) for all that the action sends, or that it consumes.
  template <typename Use>
  void sent_by(const Action& action, Use use) const {
    for_each(action, sent_forward_, sent_backward_, use);
  }
  template <typename Use>
  void consumed_by(const Action& action, Use use) const {
    for_each(action, received_forward_, received_backward_, use);
  }

 private:
  using Channels = std::vector<std::vector<int>>;  // by stage

  void add_channel(int from, int to, Channels& sent, Channels& received) {
    const auto channel = static_cast<int>(channels_.size());
    channels_.push_back({.from = from, .to = to});
    sent[from].push_back(channel);
    received[to].push_back(channel);
  }

  template <typename Use>
  void for_each(const Action& action, const Channels& forward, const Channels& backward,
                Use use) const {
    const bool is_forward = action.kind == ActionKind::kForward;
    if (!is_forward && action.kind != ActionKind::kBackward &&
        action.kind != ActionKind::kInputGrad) {
      return;
    }
    for (const int channel : (is_forward ? forward : backward)[action.stage]) {
      use(channel * span_ + action.microbatch - lowest_);
    }
  }

  const int num_microbatches_;
  const int lowest_;  // of the numbers of microbatches
  const int span_;
  std::vector<Receive> channels_;
  Channels sent_forward_, sent_backward_, received_forward_, received_backward_;
};

}  // namespace pd2
