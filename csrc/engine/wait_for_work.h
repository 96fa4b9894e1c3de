// Waiting for a collective that cannot be aborted.
#pragma once

#include "engine/channel.h"

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <functional>
#include <thread>

namespace pd2 {

// Looks now and then whether the pipeline has failed meanwhile, and throws ChannelAborted if so.
inline void wait_for_work(c10d::Work& work, const std::function<bool()>& is_stopped) {
  while (!work.isCompleted()) {
    if (is_stopped()) {
      throw ChannelAborted();
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  work.wait();
}

}  // namespace pd2
