// The sum of the gradients of a stage's two copies, where both run in this process.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

namespace pd2 {

// What an all-reduce over a group of two ranks is between processes. Shared by the copies, whose
// executors call add() from their threads. Whoever comes second adds and ends the work of both, so
// that the sum is always pipeline 0's gradient plus pipeline 1's and both get the same bits.
class CopySum {
 public:
  // `flat` of copy 0 or 1 holds the sum once the work has completed; nobody may touch it before.
  // `buffer` tells a stage's buffers apart.
  c10::intrusive_ptr<c10d::Work> add(int copy, std::size_t buffer, const at::Tensor& flat);

 private:
  // One copy has come.
  class Pending : public c10d::Work {
   public:
    Pending(int copy, at::Tensor flat) : copy_(copy), flat_(std::move(flat)) {}
    void end_with(int copy, at::Tensor flat);

   private:
    const int copy_;
    at::Tensor flat_;
  };

  std::mutex mutex_;
  std::map<std::size_t, c10::intrusive_ptr<Pending>> pending_;  // by buffer
};

// A stage's end of it.
struct CopySumEnd {
  std::shared_ptr<CopySum> sum;
  int copy = 0;
};

}  // namespace pd2
