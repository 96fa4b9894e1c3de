// When a device did what: its events on the host's clock.
#pragma once

#include "engine/clock.h"
#include "engine/streams.h"

namespace pd2 {

// Counts from one moment that both clocks know.
class DeviceClock {
 public:
  // Waits until the stream has done what it was given.
  explicit DeviceClock(const MaybeStream& stream) : base_(Fence::of(stream, /*is_timed=*/true)) {
    base_.wait();
    base_time_ = now();
  }
  // Seconds of now()'s clock at which the fence, a timed one of the device, was reached; waits.
  double time_of(const Fence& fence) const {
    fence.wait();
    return base_time_ + fence.elapsed_since(base_);
  }

 private:
  const Fence base_;
  double base_time_ = 0;
};

}  // namespace pd2
