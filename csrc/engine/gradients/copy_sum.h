// The sum of the gradients of a stage's two copies, where both run in this process.
#pragma once

#include "core/check.h"
#include "engine/streams.h"

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
  // To which one copy has come, or both.
  class Sum : public c10d::Work {
   public:
    Sum(int copy, at::Tensor flat)
        : copy_(copy), flat_(std::move(flat)), stream_(stream_here(flat_.device())) {}
    void end_with(int copy, at::Tensor flat) {
      PD2_ASSERT(copy != copy_, "copy ", copy, " came twice");
      const bool is_one_device = flat_.device() == flat.device();
      if (is_one_device) {
        Fence::of(stream_).hold_back(stream_here(flat.device()));
      }
      const OnStream guard(is_one_device ? std::nullopt : stream_);  // torch orders two devices
      at::Tensor& first = copy_ == 0 ? flat_ : flat;
      at::Tensor& second = copy_ == 0 ? flat : flat_;
      first.add_(second.to(first.device()));
      second.copy_(first);
      {
        const std::lock_guard lock(added_mutex_);
        added_ = Fence::here(flat_.device());
      }
      finish();
    }

    // Once the work has completed: the sum is there after it.
    Fence added() const {
      const std::lock_guard lock(added_mutex_);
      return added_;
    }

   private:
    const int copy_;
    at::Tensor flat_;
    const MaybeStream stream_;
    mutable std::mutex added_mutex_;
    Fence added_;
  };

  // `flat` of copy 0 or 1 holds the sum once the work has completed; nobody may touch it before.
  // `buffer` is the number of one of the stage's buffers.
  c10::intrusive_ptr<Sum> add(int copy, std::size_t buffer, const at::Tensor& flat) {
    const std::lock_guard lock(mutex_);
    const auto [place, is_first] = sums_.try_emplace(buffer);
    if (is_first) {
      place->second = c10::make_intrusive<Sum>(copy, flat);
      return place->second;
    }
    const auto sum = std::move(place->second);
    sums_.erase(place);
    sum->end_with(copy, flat);
    return sum;
  }

 private:
  std::mutex mutex_;
  std::map<std::size_t, c10::intrusive_ptr<Sum>> sums_;  // by buffer, to which one copy has come
};

// A stage's end of a CopySum.
struct CopySumEnd {
  std::shared_ptr<CopySum> sum;
  int copy = 0;
};

}  // namespace pd2
