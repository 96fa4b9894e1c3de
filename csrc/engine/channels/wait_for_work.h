// Waiting for a collective that cannot be aborted.
#pragma once

#include "engine/channels/channel.h"
#include "engine/with_peer.h"

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <exception>
#include <functional>

namespace pd2 {

// Looks now and then whether the pipeline has failed meanwhile, and throws ChannelAborted if so; a
// PeerError if the work fails, whose group has this timeout. Works of the host stay as they are
// when a wait for them has run out of time; a device's work is only enqueued: its stream waits.
inline void wait_for_work(c10d::Work& work, double timeout, bool on_host,
                          const std::function<bool()>& is_stopped) {
  if (!on_host) {
    work.wait();
    return;
  }
  const bool is_done = with_peer(timeout, std::nullopt, [&] {
    while (true) {
      // Asked before: a work that completes between a slice's end and the question has not failed.
      const bool was_completed = work.isCompleted();
      try {
        work.wait(std::chrono::milliseconds(100));
        return true;
      } catch (const std::exception&) {
        if (was_completed) {
          throw;
        }
        if (is_stopped()) {
          return false;
        }
      }
    }
  });
  if (!is_done) {
    throw ChannelAborted();
  }
}

}  // namespace pd2
