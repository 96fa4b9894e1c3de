// Transfers of a device's group as one call.
#pragma once

#include "core/check.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <exception>

namespace pd2 {

// Transfers that begin one by one come to their end one after the other, and each takes a host
// time. What the group is given while this lives is one transfer. The group is used by one thread.
class Coalescing {
 public:
  // Whether the group can do so for tensors of the device. A host's transfers gain nothing.
  static bool is_possible(c10d::ProcessGroup& group, c10::DeviceType type) {
    return type != at::kCPU && group.getBackend(type)->supportsCoalescing();
  }

  Coalescing(c10d::ProcessGroup& group, c10::DeviceType type) : group_(group), type_(type) {
    group_.startCoalescing(type_);
  }
  // After an error: the next call must not become part of what has begun.
  ~Coalescing() {
    if (!has_ended_) {
      try {
        group_.endCoalescing(type_);
      } catch (const std::exception&) {  // the first error is told
      }
    }
  }
  Coalescing(const Coalescing&) = delete;
  Coalescing& operator=(const Coalescing&) = delete;

  // Of all transfers, of which there is one at least.
  c10::intrusive_ptr<c10d::Work> end() {
    has_ended_ = true;
    auto work = group_.endCoalescing(type_);
    PD2_ASSERT(work, "transfers that nobody can wait for");
    return work;
  }

 private:
  c10d::ProcessGroup& group_;
  const c10::DeviceType type_;
  bool has_ended_ = false;
};

}  // namespace pd2
