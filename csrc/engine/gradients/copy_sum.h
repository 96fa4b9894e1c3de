// The sum of the gradients of a stage's two copies, where both run in this process.
#pragma once

#include "core/check.h"

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

namespace pd2 {

// Does within a process what an all-reduce does between two. Shared by the copies, whose executors
// call add() from their threads. The second to call adds and ends the works of both, so
// that the sum is always pipeline 0's gradient plus pipeline 1's and both get the same bits.
class CopySum {
 public:
  // `flat` of copy 0 or 1 holds the sum once the work has completed; nobody may touch it before.
  // `buffer` is the number of one of the stage's buffers.
  c10::intrusive_ptr<c10d::Work> add(int copy, std::size_t buffer, const at::Tensor& flat) {
    const std::lock_guard lock(mutex_);
    const auto [place, is_first] = pending_.try_emplace(buffer);
    if (is_first) {
      place->second = c10::make_intrusive<Pending>(copy, flat);
      return place->second;
    }
    const auto pending = std::move(place->second);
    pending_.erase(place);
    pending->end_with(copy, flat);
    return pending;
  }

 private:
  // One copy has come.
  class Pending : public c10d::Work {
   public:
    Pending(int copy, at::Tensor flat) : copy_(copy), flat_(std::move(flat)) {}
    void end_with(int copy, at::Tensor flat) {
      PD2_ASSERT(copy != copy_, "copy ", copy, " came twice");
      at::Tensor& first = copy_ == 0 ? flat_ : flat;
      at::Tensor& second = copy_ == 0 ? flat : flat_;
      first.add_(second.to(first.device()));
      second.copy_(first);
      finish();
    }

   private:
    const int copy_;
    at::Tensor flat_;
  };

  std::mutex mutex_;
  std::map<std::size_t, c10::intrusive_ptr<Pending>> pending_;  // by buffer
};

// A stage's end of a CopySum.
struct CopySumEnd {
  std::shared_ptr<CopySum> sum;
  int copy = 0;
};

}  // namespace pd2
