// Waiting for other ranks: it tells one that is gone from one that is silent.
#pragma once

#include "engine/clock.h"
#include "transport/peer_error.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <exception>
#include <limits>
#include <optional>
#include <string>

namespace pd2 {

// Seconds after which the group's transfers fail; infinity if it does not say.
inline double timeout_of(c10d::ProcessGroup* group) {
  try {
    if (group) {
      const auto options = group->getBackend(c10::DeviceType::CPU)->getBackendOptions();
      return std::chrono::duration<double>(options->timeout).count();
    }
  } catch (const c10::Error&) {  // it has no backend for the host, or one without options
  }
  return std::numeric_limits<double>::infinity();
}

// Returns what `transfer` does, which takes part in a transfer with `rank`, if that is known. Its
// failure becomes a PeerError: a timeout if it took nearly all of `timeout` seconds, since
// transports tell timeouts from broken connections in their texts alone. (Nearly: the transfer may
// have begun before, and one rank's timeout breaks the connections of others that wait as long.)
template <typename Transfer>
auto with_peer(double timeout, std::optional<int> rank, Transfer transfer) {
  const double start = now();
  const auto text = [&](const std::exception& error) {
    return (rank ? "rank " + std::to_string(*rank) + ": " : std::string()) + error.what();
  };
  try {
    return transfer();
  } catch (const PeerTimeout& error) {
    throw PeerTimeout(text(error), rank);
  } catch (const PeerLost& error) {
    throw PeerLost(text(error), rank);
  } catch (const std::exception& error) {
    if (now() - start >= 0.9 * timeout) {
      throw PeerTimeout(text(error), rank);
    }
    throw PeerLost(text(error), rank);
  }
}

}  // namespace pd2
