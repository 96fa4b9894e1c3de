// A batch's loss from its microbatches' losses.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pd2 {

// The mean over the batch's rows of what are means over the microbatches' rows, or the sum of sums.
// With two pipelines each has a part of the microbatches.
struct BatchLoss {
  std::vector<std::int64_t> rows;  // by microbatch of the batch; empty if losses are sums
  std::vector<at::Tensor> losses;  // by microbatch, those forwarded so far
  std::size_t first = 0;           // the number in the batch of the first of them
  // Numbers beside the loss (metrics), already weighed and added up to here; undefined: none.
  at::Tensor metrics{};

  // `value` with the weight of the `microbatch`-th of them: what autograd would do forwards and
  // backwards.
  at::Tensor weighted(const at::Tensor& value, std::size_t microbatch) const;
  // Added in microbatch order to `before`, the sum of the microbatches before the first.
  at::Tensor sum(at::Tensor before = {}) const;
  // On the CPU in double precision: the loss, then the metrics. `before`: the same of the
  // microbatches before the first.
  at::Tensor numbers(const at::Tensor& before = {}) const;
};

}  // namespace pd2
