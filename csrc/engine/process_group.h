// The end of a process group.
#pragma once

#include "engine/fault.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <exception>
#include <future>
#include <thread>
#include <utility>

namespace pd2 {

// Releases a reference to a group. With the last one the group ends, and gloo's waits then for
// collectives that have begun: where another process is stopped, up to their timeout. That may
// follow other waits for the same process, so after a moment the group is left to a thread.
inline void release_group(c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  if (!group) {
    return;
  }
  std::promise<void> ended;
  const std::future<void> is_ended = ended.get_future();
  std::thread([group = std::move(group), ended = std::move(ended)]() mutable {
    group.reset();
    ended.set_value();
  }).detach();
  is_ended.wait_for(std::chrono::milliseconds(500));
}

// Aborts the group when the fault is raised, if it is still there: a device that waits for a
// transfer of which the other end is gone goes on, and with it the threads that wait for the
// device. Nothing else ends such a transfer, since no thread waits for the transfer itself.
//
// NCCL's abort waits until the device is idle, and so for transfers of the other groups that are
// aborted: all are at once.
inline void abort_on_fault(Fault& fault, const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  const c10::weak_intrusive_ptr<c10d::ProcessGroup> weak(group);
  fault.abort_on_raise([weak] {
    try {
      if (const auto alive = weak.lock()) {
        alive->abort();
      }
    } catch (const std::exception&) {  // others are to be aborted too
    }
  });
}

}  // namespace pd2
