// Vector clocks: what of every stream's work is known to be over.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace pd2 {

using StreamNumber = std::size_t;  // of all devices' streams, from 0 on
using Tick = std::uint64_t;        // the n-th launch of a stream

// For every stream a tick; a stream that it does not mention has tick 0.
class Clock {
 public:
  Tick at(StreamNumber stream) const { return stream < ticks_.size() ? ticks_[stream] : 0; }

  void set(StreamNumber stream, Tick tick) {
    if (stream >= ticks_.size()) ticks_.resize(stream + 1, 0);
    ticks_[stream] = std::max(ticks_[stream], tick);
  }

  void join(const Clock& other) {
    for (StreamNumber stream = 0; stream < other.ticks_.size(); ++stream) {
      set(stream, other.ticks_[stream]);
    }
  }

  // Whether all that the other one knows is known here too.
  bool covers(const Clock& other) const {
    for (StreamNumber stream = 0; stream < other.ticks_.size(); ++stream) {
      if (other.ticks_[stream] > at(stream)) return false;
    }
    return true;
  }

 private:
  std::vector<Tick> ticks_;
};

}  // namespace pd2
