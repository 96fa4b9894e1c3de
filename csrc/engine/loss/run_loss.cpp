#include "engine/loss/run_loss.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>

#include <utility>

namespace pd2 {

at::Tensor LossWeights::weighted(const at::Tensor& value, std::size_t microbatch) const {
  return factors.empty() ? value / divisor : value * factors.at(microbatch);
}

void RunLoss::take_to_host() {
  if (!stream) {
    return;
  }
  const OnStream guard(stream);
  ready.hold_back(stream);
  for (const at::Tensor& loss : losses) {
    use_on(loss, stream);
  }
  if (!metrics.defined()) {
    if (!losses.empty()) {
      losses = at::stack(losses).to(at::kCPU).unbind();
    }
    return;
  }
  // The bytes of both, as their dtypes may differ: metrics first, whose alignment is the larger.
  use_on(metrics, stream);
  const at::Tensor stacked = at::stack(losses);
  const at::Tensor bytes =
      at::cat({metrics.view(at::kByte), stacked.reshape({-1}).view(at::kByte)}).to(at::kCPU);
  const auto split = static_cast<std::int64_t>(metrics.nbytes());
  metrics = bytes.slice(0, 0, split).view(metrics.scalar_type());
  losses = bytes.slice(0, split).view(stacked.scalar_type()).view(stacked.sizes()).unbind();
}

at::Tensor RunLoss::sum(at::Tensor before) const {
  at::Tensor sum = std::move(before);
  for (std::size_t microbatch = 0; microbatch < losses.size(); ++microbatch) {
    const at::Tensor loss = weights.weighted(losses[microbatch], first + microbatch);
    sum = sum.defined() ? sum.to(loss.options()).reshape(loss.sizes()) + loss : loss;
  }
  return sum;
}

at::Tensor RunLoss::numbers(const at::Tensor& before) const {
  const auto doubles = [](const at::Tensor& tensor) {
    return tensor.to(at::kCPU, at::kDouble).reshape({-1}).contiguous();
  };
  const at::Tensor loss = doubles(sum(before.defined() ? before.slice(0, 0, 1) : at::Tensor()));
  if (!metrics.defined()) {
    return loss;
  }
  const at::Tensor mine = doubles(metrics);
  return at::cat({loss, before.defined() ? before.slice(0, 1) + mine : mine});
}

}  // namespace pd2
