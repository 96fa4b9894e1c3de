#include "engine/run/wiring.h"

#include <set>
#include <utility>

namespace pd2 {
namespace {

// Calls `use` with both channels of every edge.
template <typename Use>
void for_each_channel(const std::map<int, Wiring>& wirings, Use use) {
  for (const auto& [id, wiring] : wirings) {
    for (const InboundEdge& edge : wiring.inbound) {
      use(*edge.values);
      use(*edge.gradients);
    }
    for (const OutboundEdge& edge : wiring.outbound) {
      use(*edge.values);
      use(*edge.gradients);
    }
  }
}

}  // namespace

void Wirings::set(int id, Wiring wiring) {
  const std::lock_guard lock(mutex_);
  wirings_[id] = std::move(wiring);
}

const Wiring& Wirings::at(int id) const {
  const std::lock_guard lock(mutex_);
  return wirings_.at(id);
}

void Wirings::abort() const {
  const std::lock_guard lock(mutex_);
  for_each_channel(wirings_, [](auto& channel) { channel.abort(); });
}

void Wirings::clear() {
  const std::lock_guard lock(mutex_);
  wirings_.clear();
}

std::int64_t Wirings::buffer_bytes() const {
  const std::lock_guard lock(mutex_);
  std::set<const void*> counted;
  std::int64_t sum = 0;
  for_each_channel(wirings_, [&](const auto& channel) {
    if (counted.insert(&channel).second) {
      sum += channel.buffer_bytes();
    }
  });
  return sum;
}

}  // namespace pd2
