// Waiting for other processes and threads, which a failure of the pipeline ends.
#pragma once

#include "engine/channels/channel.h"
#include "engine/clock.h"
#include "engine/with_peer.h"
#include "transport/peer_error.h"
#include "transport/shared_board.h"

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

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

// Waits until `is_there`, whose change is notified; `lock` guards it. Throws ChannelAborted if the
// pipeline has failed meanwhile.
template <typename IsThere>
void wait_until(std::condition_variable& changed, std::unique_lock<std::mutex>& lock,
                const std::function<bool()>& is_stopped, IsThere is_there) {
  while (!changed.wait_for(lock, std::chrono::milliseconds(100), is_there)) {
    lock.unlock();
    if (is_stopped()) {
      throw ChannelAborted();
    }
    lock.lock();
  }
}

// All ranks' rows, once all have begun the exchange that this one has. Throws ChannelAborted when
// stopped, PeerTimeout if a rank has not `given` its row in time.
inline std::vector<std::int64_t> finish_exchange(SharedBoard& shared, const std::string& given,
                                                 const std::function<bool()>& is_stopped) {
  std::optional<std::vector<std::int64_t>> rows;
  const double start = now(), timeout = shared.timeout().count();
  while (!(rows = shared.finish_exchange(std::chrono::milliseconds(100)))) {
    if (is_stopped()) {
      throw ChannelAborted();
    }
    if (now() - start > timeout) {
      throw PeerTimeout("timeout: a rank gave no " + given + " for " + std::to_string(timeout) +
                        " seconds");
    }
  }
  return *rows;
}

}  // namespace pd2
