// A queue of byte messages between two processes of one machine, in memory that both map.
#pragma once

#include "transport/shared_memory.h"

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace pd2 {

// One process writes, one reads; a message costs two copies and no system call while both are
// awake. A waiting end looks for a while before it sleeps, since waking up takes tens of
// microseconds (on virtual machines a hundred and more), longer than balanced stages wait.
//
// An end that waits for a process that has ended throws PeerLost within a tenth of a second.
class SharedRing {
 public:
  static constexpr std::size_t kMaxMessageBytes = std::size_t{1} << 20;

  using Timeout = std::chrono::duration<double>;

  // The writer's end, with room for `num_slots` messages that have not been read. Null if there
  // is no such memory. Waiting for the other end throws after `timeout`, and when its process has
  // ended.
  static std::unique_ptr<SharedRing> create(std::uint32_t num_slots, Timeout timeout);
  // The reader's end. Null if the writer's memory cannot be reached.
  static std::unique_ptr<SharedRing> open(const std::string& address, Timeout timeout);
  SharedRing(const SharedRing&) = delete;
  SharedRing& operator=(const SharedRing&) = delete;

  // Of the writer's end, for open() in the reader's process while the writer's end exists.
  const std::string& address() const { return memory_->address(); }

  // Writing: a slot of kMaxMessageBytes, waiting for one if need be; null once aborted. At most
  // `bytes` are written to it before end_write() hands it to the reader.
  std::byte* begin_write(std::size_t bytes);
  void end_write();

  // Reading: the oldest message, waiting for it if need be; null once aborted. It is valid until
  // end_read(). `bytes`: its size, which both ends know.
  const std::byte* begin_read(std::size_t bytes);
  void end_read();

  // Ends waiting in this process, now and later. May be called from any thread.
  void abort();

  // Whether the process of the other end has. By a thread that may read or write.
  bool peer_has_ended();

  // Bytes of the ring that have been used, and so take up memory.
  std::size_t used_bytes() const { return used_bytes_.load(std::memory_order_relaxed); }

 private:
  struct Shared;  // what lies in the memory

  SharedRing(std::unique_ptr<SharedMemory> memory, Timeout timeout);
  bool wait_while(const std::atomic<std::uint32_t>& word, std::uint32_t value,
                  std::atomic<std::uint32_t>& sleeping);
  std::byte* slot(std::uint32_t index);
  void use(std::uint32_t index, std::size_t bytes);

  const std::unique_ptr<SharedMemory> memory_;
  Shared* const shared_;
  const std::uint32_t num_slots_;
  const Timeout timeout_;
  std::optional<WatchedProcess> peer_;  // the other end's, once it is known
  std::atomic<bool> aborted_ = false;
  std::atomic<std::size_t> used_bytes_ = 0;
  std::vector<std::size_t> used_by_slot_;

  // Used by the writing or the reading thread alone.
  std::uint32_t next_ = 0;                 // number of the message to write or read, modulo 2^32
  std::uint32_t reclaimed_ = 0;            // writer: messages whose slots are free again
  std::vector<std::uint32_t> free_slots_;  // writer: the last one freed is used first
};

}  // namespace pd2
