// The channels over which a stage exchanges messages with other stages.
#pragma once

#include "engine/channels/channel.h"

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <ranges>
#include <utility>
#include <vector>

namespace pd2 {

// A stage's end of an edge. An inbound one receives values and sends their gradients back, an
// outbound one the reverse.
struct EdgeEnd {
  std::shared_ptr<Receiver> receiver;
  std::shared_ptr<Sender> sender;
  int other = -1;  // the stage at the other end, one of the schedule
};

// The edges of one capture of the model.
struct Wiring {
  std::vector<EdgeEnd> inbound, outbound;
};

// A stage's wirings by number: a model captured in two modes may have different edges, which share
// channels. Thread-safe.
class Wirings {
 public:
  void set(int id, Wiring wiring) {
    const std::lock_guard lock(mutex_);
    wirings_[id] = std::move(wiring);
  }
  // Throws std::out_of_range if there is none. It stays as it is until clear().
  const Wiring& at(int id) const {
    const std::lock_guard lock(mutex_);
    return wirings_.at(id);
  }
  // Ends all waiting of hosts on the channels, now and later.
  void abort() const {
    for_each_end([](ChannelEnd& end) { end.abort(); });
  }
  // After abort(): see ChannelEnd.
  bool tell_cut_off() const {
    bool is_any = false;
    for_each_end([&](ChannelEnd& end) { is_any |= end.tell_cut_off(); });
    return is_any;
  }
  void cut_off() const {
    for_each_end([](ChannelEnd& end) { end.cut_off(); });
  }
  bool is_cut_off() const {
    bool is_any = false;
    for_each_end([&](const ChannelEnd& end) { is_any |= end.is_cut_off(); });
    return is_any;
  }
  // Releases the channels. No other thread may use a wiring any more.
  void clear() {
    const std::lock_guard lock(mutex_);
    wirings_.clear();
  }
  // Bytes of the channels' buffers, each channel counted once.
  std::int64_t buffer_bytes() const {
    std::map<const ChannelEnd*, std::int64_t> bytes;
    for_each_end([&](const ChannelEnd& end) { bytes[&end] = end.buffer_bytes(); });
    const auto values = std::views::values(bytes);
    return std::accumulate(values.begin(), values.end(), std::int64_t{0});
  }

 private:
  template <typename Use>
  void for_each_end(Use use) const {
    const std::lock_guard lock(mutex_);
    for (const auto& [id, wiring] : wirings_) {
      for (const auto* edges : {&wiring.inbound, &wiring.outbound}) {
        for (const EdgeEnd& edge : *edges) {
          use(*edge.receiver);
          use(*edge.sender);
        }
      }
    }
  }

  mutable std::mutex mutex_;
  std::map<int, Wiring> wirings_;
};

}  // namespace pd2
