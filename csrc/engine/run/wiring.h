// The channels over which a stage exchanges messages with other stages.
#pragma once

#include "engine/channels/channel.h"

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace pd2 {

// An edge as its consumer sees it: values come in, their gradients go back.
struct InboundEdge {
  int producer = 0;
  std::shared_ptr<Receiver> values;
  std::shared_ptr<Sender> gradients;
};

// An edge as its producer sees it.
struct OutboundEdge {
  int consumer = 0;
  std::shared_ptr<Sender> values;
  std::shared_ptr<Receiver> gradients;
};

// The edges of one capture of the model.
struct Wiring {
  std::vector<InboundEdge> inbound;
  std::vector<OutboundEdge> outbound;
};

// A stage's wirings by number: a model captured in two modes may have different edges, which share
// channels. Thread-safe.
class Wirings {
 public:
  void set(int id, Wiring wiring);
  // Throws std::out_of_range if there is none. It stays as it is until clear().
  const Wiring& at(int id) const;
  // Ends all waiting on the channels, now and later.
  void abort() const;
  // Releases the channels. No other thread may use a wiring any more.
  void clear();
  // Bytes of the channels' buffers, each channel counted once.
  std::int64_t buffer_bytes() const;

 private:
  mutable std::mutex mutex_;
  std::map<int, Wiring> wirings_;
};

}  // namespace pd2
