// A batch's loss from its microbatches' losses.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pd2 {

// The mean over the batch's rows of what are means over the microbatches' rows, or the sum of sums.
struct BatchLoss {
  std::vector<std::int64_t> rows;  // by microbatch; empty if losses are sums
  std::vector<at::Tensor> losses;  // by microbatch, those forwarded so far

  // `value` with the weight of `microbatch`: what autograd would do forwards and backwards.
  at::Tensor weighted(const at::Tensor& value, std::size_t microbatch) const;
  at::Tensor sum() const;
};

}  // namespace pd2
