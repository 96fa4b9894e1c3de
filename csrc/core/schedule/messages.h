// The messages that actions send and consume, by number; and when they arrive.

#pragma once

#include "core/floor.h"
#include "core/schedule/schedule.h"

#include <algorithm>
#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace pd2 {

// A connection between two stages of the model: values go `from` -> `to`, their gradients back.
struct StageEdge {
  int from = 0;
  int to = 0;
};

// Those of stages that send to the next one alone.
inline std::vector<StageEdge> chain_of(int depth) {
  std::vector<StageEdge> edges;
  for (int stage = 0; stage + 1 < depth; ++stage) edges.push_back({stage, stage + 1});
  return edges;
}

// A message, as its receiver knows it: values if `from` < `to`, gradients otherwise. `to` consumes
// it in its F, or its B (I), of the microbatch, which counts as the list's actions do.
struct Receive {
  int from = 0;  // the schedule's stages
  int to = 0;
  int microbatch = 0;

  auto operator<=>(const Receive&) const = default;
};

// Whether it sends and consumes gradients.
inline bool begins_backward(ActionKind kind) {
  return kind == ActionKind::kBackward || kind == ActionKind::kInputGrad;
}

// Whether the stages of one rank send messages to each other, too.
enum class Between : std::uint8_t { kStages, kRanks };

// One direction of an edge in one pipeline.
struct Channel {
  int from = 0;  // the schedule's stages
  int to = 0;
  int edge = 0;  // the place among those that were given
};

// Some neighbours of every pipeline's.
struct Microbatches {
  std::int64_t first = 0;
  std::int64_t count = 0;
};

class MessageTable {
 public:
  MessageTable(const Schedule& schedule, const std::vector<StageEdge>& edges,
               const Microbatches& of, Between between = Between::kStages)
      : num_microbatches_(schedule.num_microbatches), first_(of.first), count_(of.count) {
    for (auto* ends : {&sent_, &consumed_}) ends->fill(Channels(schedule.num_stages));
    for (int stage = 0; stage < schedule.num_stages; stage += schedule.depth()) {
      for (int edge = 0; edge < static_cast<int>(edges.size()); ++edge) {
        const int from = stage + edges[edge].from;
        const int to = stage + edges[edge].to;
        const bool is_local = schedule.placement[from] == schedule.placement[to];
        if (is_local && between == Between::kRanks) continue;
        add_channel({from, to, edge}, kForwards);
        add_channel({to, from, edge}, kBackwards);
      }
    }
  }

  std::size_t size() const { return channels_.size() * count_; }
  std::int64_t number(int channel, std::int64_t microbatch) const {
    return channel * count_ + microbatch - first_;
  }
  Receive operator[](std::int64_t message) const {
    const Channel& channel = channels_[message / count_];
    return {channel.from, channel.to, static_cast<int>(message % count_ + first_)};
  }

  const std::vector<Channel>& channels() const { return channels_; }
  // By number, those that an action sends on and those that it waits for, in the order of edges.
  std::span<const int> sent(int stage, ActionKind kind) const { return of(sent_, stage, kind); }
  std::span<const int> consumed(int stage, ActionKind kind) const {
    return of(consumed_, stage, kind);
  }

  // Whether an action may send several messages, or consume them.
  bool come_together() const {
    const auto is_several = [](const std::vector<int>& channels) { return channels.size() > 1; };
    return std::ranges::any_of(sent_[kForwards], is_several) ||
           std::ranges::any_of(sent_[kBackwards], is_several);
  }

  // The same for the messages of all batches that have one place in their batch.
  std::size_t num_places() const { return channels_.size() * num_microbatches_; }
  std::size_t place(std::int64_t message) const {
    return message / count_ * num_microbatches_ +
           floor_mod((*this)[message].microbatch, num_microbatches_);
  }

  // Calls use(message) for all that the action sends, or that it consumes.
  template <typename Use>
  void sent_by(const Action& action, Use use) const {
    for (const int each : sent(action.stage, action.kind)) use(number(each, action.microbatch));
  }
  template <typename Use>
  void consumed_by(const Action& action, Use use) const {
    for (const int each : consumed(action.stage, action.kind)) use(number(each, action.microbatch));
  }

 private:
  using Channels = std::vector<std::vector<int>>;  // by stage
  enum Direction : std::uint8_t { kForwards, kBackwards };
  using Ends = std::array<Channels, 2>;  // by direction

  void add_channel(const Channel& channel, Direction direction) {
    const auto number = static_cast<int>(channels_.size());
    channels_.push_back(channel);
    sent_[direction][channel.from].push_back(number);
    consumed_[direction][channel.to].push_back(number);
  }

  static std::span<const int> of(const Ends& ends, int stage, ActionKind kind) {
    if (kind == ActionKind::kForward) return ends[kForwards][stage];
    if (begins_backward(kind)) return ends[kBackwards][stage];
    return {};
  }

  const int num_microbatches_;
  const std::int64_t first_;
  const std::int64_t count_;
  std::vector<Channel> channels_;
  Ends sent_, consumed_;
};

// When each message arrives, as far as a walk has come. Steps and actions are told alike.
class Arrivals {
 public:
  explicit Arrivals(MessageTable messages)
      : messages_(std::move(messages)), times_(messages_.size(), kUnknown) {}

  const MessageTable& messages() const { return messages_; }

  // The first stage of which a message that the step consumes is not known to arrive.
  template <typename Step>
  std::optional<int> missing(const Step& step) const {
    for (const int channel : messages_.consumed(step.stage, step.kind)) {
      if (times_[messages_.number(channel, step.microbatch)] == kUnknown) {
        return messages_.channels()[channel].from;
      }
    }
    return std::nullopt;
  }

  // When all that the step consumes is there, but not before `time`.
  template <typename Step>
  double latest(const Step& step, double time) const {
    for (const int channel : messages_.consumed(step.stage, step.kind)) {
      time = std::max(time, times_[messages_.number(channel, step.microbatch)]);
    }
    return time;
  }

  // Calls at(channel) for each that the step sends on, which gives the time of arrival.
  template <typename Step, typename At>
  void send(const Step& step, At&& at) {
    for (const int channel : messages_.sent(step.stage, step.kind)) {
      times_[messages_.number(channel, step.microbatch)] = at(channel);
    }
  }

 private:
  static constexpr double kUnknown = -1;

  MessageTable messages_;
  std::vector<double> times_;  // by message
};

}  // namespace pd2
