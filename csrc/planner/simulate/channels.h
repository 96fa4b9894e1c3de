// Which messages the stages of a simulated run send to each other.

#pragma once

#include "planner/simulate/simulate.h"

#include <algorithm>
#include <vector>

namespace pd2 {

inline bool begins_backward(ActionKind kind) {
  return kind == ActionKind::kBackward || kind == ActionKind::kInputGrad;
}

struct Channel {
  int sender = 0;  // stages
  int receiver = 0;
  EdgeCosts edge;
};

// The channels of every pipeline: both directions of each edge and of each skip.
class Channels {
 public:
  Channels(const Schedule& schedule, const Costs& costs) : ends_(schedule.num_stages) {
    const int d = schedule.depth();
    std::vector<SkipCosts> all = costs.skips;
    for (int stage = 0; stage + 1 < d; ++stage) {
      all.push_back({stage, stage + 1, costs.edges.empty() ? EdgeCosts{} : costs.edges[stage]});
    }
    std::ranges::stable_sort(all, {}, [](const SkipCosts& way) { return way.to - way.from; });
    for (int copies = 0; copies < schedule.num_stages; copies += d) {
      for (const SkipCosts& way : all) {
        add(copies + way.from, copies + way.to, way.edge, &Ends::forward);
        add(copies + way.to, copies + way.from, way.edge, &Ends::backward);
      }
    }
  }

  int count() const { return static_cast<int>(channels_.size()); }
  const Channel& operator[](int channel) const { return channels_[channel]; }
  // The channels that an action waits for, and those that it sends on, the nearest stage first.
  const std::vector<int>& inputs(int stage, ActionKind kind) const {
    return of(stage, kind).inputs;
  }
  const std::vector<int>& outputs(int stage, ActionKind kind) const {
    return of(stage, kind).outputs;
  }

 private:
  struct Direction {
    std::vector<int> inputs;
    std::vector<int> outputs;
  };
  struct Ends {
    Direction forward;
    Direction backward;
    Direction none;  // of actions without messages
  };

  void add(int sender, int receiver, const EdgeCosts& edge, Direction Ends::*direction) {
    (ends_[sender].*direction).outputs.push_back(count());
    (ends_[receiver].*direction).inputs.push_back(count());
    channels_.push_back({sender, receiver, edge});
  }

  const Direction& of(int stage, ActionKind kind) const {
    const Ends& ends = ends_[stage];
    if (kind == ActionKind::kForward) return ends.forward;
    return begins_backward(kind) ? ends.backward : ends.none;
  }

  std::vector<Channel> channels_;
  std::vector<Ends> ends_;  // by stage
};

}  // namespace pd2
