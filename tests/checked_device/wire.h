// Bytes between the ranks of a communicator, over gloo; what waits can be aborted.

#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

namespace pd2 {

// Messages of one direction arrive in order. One thread sends and receives; any may abort.
class Wire {
 public:
  // Ranks are those of the gloo group; no two wires of a group have the same tag.
  Wire(c10::intrusive_ptr<c10d::Backend> gloo, int tag, std::chrono::milliseconds timeout)
      : gloo_(std::move(gloo)), tag_(tag), timeout_(timeout) {}

  void begin_send(const void* data, std::size_t bytes, int peer);
  void begin_receive(void* data, std::size_t bytes, int peer);
  // Until all that was begun is over. Throws what failed.
  void finish();
  // The bytes are copied, and nobody waits until they are received.
  void send_eagerly(const void* data, std::size_t bytes, int peer);

  void abort();
  // As a kernel does whose peer is gone: until somebody aborts, which it returns, or the time since
  // the last begun message is up.
  bool spin_until_aborted();

 private:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  void begin(const WorkPtr& work);

  const c10::intrusive_ptr<c10d::Backend> gloo_;
  const int tag_;
  const std::chrono::milliseconds timeout_;
  std::condition_variable changed_;
  std::chrono::steady_clock::time_point last_begun_ = std::chrono::steady_clock::now();
  std::mutex mutex_;
  bool aborted_ = false;
  std::vector<WorkPtr> begun_;
  std::vector<WorkPtr> eager_;
};

}  // namespace pd2
