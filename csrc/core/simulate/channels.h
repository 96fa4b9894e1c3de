// Which messages the stages of a simulated run send to each other.

#pragma once

#include "core/simulate/simulate.h"

#include <vector>

namespace pd2 {

inline bool begins_backward(ActionKind kind) {
  return kind == ActionKind::kBackward || kind == ActionKind::kInputGrad;
}

struct Channel {
  int sender = 0;  // stages
  int receiver = 0;
  EdgeCosts edge;

  bool is_gradient() const { return receiver < sender; }
};

// The channels of every pipeline: both directions of each edge and of each skip.
class Channels {
 public:
  Channels(const Schedule& schedule, const Costs& costs);

  int count() const { return static_cast<int>(channels_.size()); }
  const Channel& operator[](int channel) const { return channels_[channel]; }
  // The channels that an action waits for, and those that it sends on, the nearest stage first.
  const std::vector<int>& inputs(int stage, ActionKind kind) const;
  const std::vector<int>& outputs(int stage, ActionKind kind) const;

 private:
  struct Ends {
    std::vector<int> inputs;
    std::vector<int> outputs;
  };

  void add(int sender, int receiver, const EdgeCosts& edge);

  std::vector<Channel> channels_;
  std::vector<Ends> forward_;  // by stage
  std::vector<Ends> backward_;
};

}  // namespace pd2
