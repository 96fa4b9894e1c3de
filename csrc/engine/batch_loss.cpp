#include "engine/batch_loss.h"

#include <ATen/TensorOperators.h>

#include <numeric>

namespace pd2 {

at::Tensor BatchLoss::weighted(const at::Tensor& value, std::size_t microbatch) const {
  if (rows.empty()) {
    return value;
  }
  if (rows.front() == rows.back()) {  // only the last microbatches may be smaller
    return value / static_cast<std::int64_t>(rows.size());
  }
  const auto all = std::accumulate(rows.begin(), rows.end(), 0.0);
  return value * (static_cast<double>(rows[microbatch]) / all);
}

at::Tensor BatchLoss::sum() const {
  at::Tensor sum = weighted(losses.front(), 0);
  for (std::size_t microbatch = 1; microbatch < losses.size(); ++microbatch) {
    sum = sum + weighted(losses[microbatch], microbatch);
  }
  return sum;
}

}  // namespace pd2
