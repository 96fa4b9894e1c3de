// An exchange between all processes of a pipeline, in memory that all of them map.
#pragma once

#include "transport/peer_error.h"
#include "transport/shared_memory.h"

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace pd2 {

// Rows, which all ranks exchange, and numbers, which one rank sends to some. Either costs a rank at
// most one sleep, and the rank that others wait for one system call to wake them all. A rank that
// waits sleeps at once, without polling first: ranks arrive far apart, and the rank that it waits
// for may need the core.
//
// One thread of each process exchanges, one sends and receives. Waiting for a process that has
// ended or left throws PeerLost within a tenth of a second.
class SharedBoard {
 public:
  // A sender waits while the slowest reader still has this many numbers to receive.
  static constexpr std::uint32_t kRoom = 64;

  using Timeout = std::chrono::duration<double>;

  // Rank 0's, for `num_ranks` ranks and rows of `row_size`. Null if there is no such memory.
  // Sending and receiving throw PeerTimeout after `timeout`.
  static std::unique_ptr<SharedBoard> create(int num_ranks, int row_size, Timeout timeout);
  // Another rank's; null if rank 0's memory cannot be reached. No rank uses its board before all
  // have theirs.
  static std::unique_ptr<SharedBoard> open(const std::string& address, int rank, Timeout timeout);
  ~SharedBoard();
  SharedBoard(const SharedBoard&) = delete;
  SharedBoard& operator=(const SharedBoard&) = delete;

  // Rank 0's, for open() while its board exists.
  const std::string& address() const { return memory_->address(); }

  Timeout timeout() const { return timeout_; }

  // This rank's row of the next exchange; the last one must be finished.
  void begin_exchange(std::span<const std::int64_t> row);
  // Every rank's row, one after the other, once all ranks have begun; none if they have not within
  // `timeout`. Throws when this process has left.
  std::optional<std::vector<std::int64_t>> finish_exchange(Timeout timeout);

  // A rank's numbers all go to the same ranks, each of which receives all of them, in order. When
  // this process has left, `send` does nothing and `receive` returns none.
  void send(double value, std::span<const int> ranks);
  std::optional<double> receive(int rank);

  // A number that every rank may read and change at any time; 0 at first.
  std::atomic<std::uint64_t>& word();

  // Ends waiting in this process, now and later, and other ranks' waiting for this one. May be
  // called from any thread.
  void leave();

 private:
  struct Shared;  // what lies in the memory
  struct Member;

  SharedBoard(std::unique_ptr<SharedMemory> memory, int rank, Timeout timeout);
  static std::size_t bytes(int num_ranks, int row_size);
  Member& member(int rank);
  // How many of `from`'s numbers `to` has received, modulo 2^32.
  std::atomic<std::uint32_t>& received(int from, int to);
  std::span<std::int64_t> rows_of(std::uint32_t exchange);

  // False if `word` is still `value` after `timeout`, or when this process has left.
  bool wait_while(const std::atomic<std::uint32_t>& word, std::uint32_t value,
                  std::span<const int> awaited, Timeout timeout);
  // Describes the first of `ranks` that has ended or left.
  std::optional<PeerLost> find_missing(std::span<const int> ranks);

  const std::unique_ptr<SharedMemory> memory_;
  Shared* const shared_;
  const int rank_;
  const Timeout timeout_;
  std::vector<int> all_ranks_;
  std::uint32_t exchange_ = 0;  // how many this rank has finished
  std::atomic<bool> left_ = false;

  std::mutex watched_mutex_;
  std::vector<std::unique_ptr<WatchedProcess>> watched_;  // by rank, made when first looked at
};

}  // namespace pd2
