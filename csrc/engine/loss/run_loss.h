// A run's loss from its microbatches' losses.
#pragma once

#include "engine/streams.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pd2 {

// The mean over the run's rows, from means over its microbatches' rows, or the sum of their sums.
// Each of two pipelines has a part of the microbatches.
struct RunLoss {
  std::vector<std::int64_t> rows;  // by microbatch of the run; empty if losses are sums
  std::vector<at::Tensor> losses;  // by microbatch, those forwarded so far
  std::size_t first = 0;           // the number in the run of the first of them
  // The metrics, already weighted and added up over these microbatches; undefined: none.
  at::Tensor metrics{};
  bool is_discarded = false;  // the run has no loss
  // Losses and metrics are there after it; on this stream they are copied to the host.
  Fence ready{};
  MaybeStream stream{};

  // `value` with the weight of the `microbatch`-th of them, computed as autograd would, forwards
  // and backwards.
  at::Tensor weighted(const at::Tensor& value, std::size_t microbatch) const;
  // Added in microbatch order to `before`, the sum of the microbatches before the first.
  at::Tensor sum(at::Tensor before = {}) const;
  // Makes them tensors of the CPU, by one copy. Waits for the device.
  void take_to_host();
  // On the CPU in double precision: the loss, then the metrics. `before`: the same of the
  // microbatches before the first.
  at::Tensor numbers(const at::Tensor& before = {}) const;
};

}  // namespace pd2
