// The exchanges of rows that updates make with other processes.
#pragma once

#include "engine/channels/channel.h"
#include "engine/clock.h"
#include "transport/peer_error.h"
#include "transport/shared_board.h"

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace pd2 {

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
