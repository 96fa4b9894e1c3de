#include "core/simulate/channels.h"

#include <algorithm>

namespace pd2 {
namespace {

const std::vector<int> kNone;

}  // namespace

Channels::Channels(const Schedule& schedule, const Costs& costs)
    : forward_(schedule.num_stages), backward_(schedule.num_stages) {
  const int d = schedule.depth();
  std::vector<SkipCosts> all;
  for (int stage = 0; stage + 1 < d; ++stage) {
    all.push_back({stage, stage + 1, costs.edges.empty() ? EdgeCosts{} : costs.edges[stage]});
  }
  all.insert(all.end(), costs.skips.begin(), costs.skips.end());
  std::ranges::stable_sort(all, {}, [](const SkipCosts& way) { return way.to - way.from; });
  for (int copies = 0; copies < schedule.num_stages; copies += d) {
    for (const SkipCosts& way : all) {
      add(copies + way.from, copies + way.to, way.edge);
      add(copies + way.to, copies + way.from, way.edge);
    }
  }
}

void Channels::add(int sender, int receiver, const EdgeCosts& edge) {
  channels_.push_back({sender, receiver, edge});
  std::vector<Ends>& ends = channels_.back().is_gradient() ? backward_ : forward_;
  ends[sender].outputs.push_back(count() - 1);
  ends[receiver].inputs.push_back(count() - 1);
}

const std::vector<int>& Channels::inputs(int stage, ActionKind kind) const {
  if (kind == ActionKind::kForward) return forward_[stage].inputs;
  return begins_backward(kind) ? backward_[stage].inputs : kNone;
}

const std::vector<int>& Channels::outputs(int stage, ActionKind kind) const {
  if (kind == ActionKind::kForward) return forward_[stage].outputs;
  return begins_backward(kind) ? backward_[stage].outputs : kNone;
}

}  // namespace pd2
