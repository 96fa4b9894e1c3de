// What a transfer between ranks throws when the other rank does not do its part.
#pragma once

#include <optional>
#include <stdexcept>
#include <string>

namespace pd2 {

// One of the two below.
class PeerError : public std::runtime_error {
 public:
  // `rank`: the other one, if it is known which.
  explicit PeerError(const std::string& text, std::optional<int> rank = std::nullopt)
      : std::runtime_error(text), rank_(rank) {}

  std::optional<int> rank() const { return rank_; }

 private:
  std::optional<int> rank_;
};

// The other process has ended or left, or the connection broke.
struct PeerLost : PeerError {
  using PeerError::PeerError;
};

// The other rank did nothing for the whole timeout.
struct PeerTimeout : PeerError {
  using PeerError::PeerError;
};

}  // namespace pd2
