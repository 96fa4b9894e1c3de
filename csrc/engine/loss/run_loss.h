// A run's loss from its microbatches' losses.
#pragma once

#include "engine/streams.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pd2 {

// The weights of microbatches' losses in the loss that they add up to.
struct LossWeights {
  std::int64_t divisor = 1;     // of means over as many rows: how many there are; of sums 1
  std::vector<double> factors;  // by microbatch of the run, of means over different rows; or none

  // `value` with the weight of the `microbatch`-th, computed as autograd would, forwards and
  // backwards.
  at::Tensor weighted(const at::Tensor& value, std::size_t microbatch) const;
};

// The mean over rows, from means over microbatches' rows, or the sum of their sums. Each of two
// pipelines has a part of the microbatches; so has each replica whose rows are a part of the batch.
struct RunLoss {
  LossWeights weights{};
  std::vector<at::Tensor> losses;  // by microbatch, those forwarded so far
  std::size_t first = 0;           // the number in the run of the first of them
  // The metrics, already weighted and added up over these microbatches; undefined: none.
  at::Tensor metrics{};
  bool is_discarded = false;  // the run has no loss
  // Losses and metrics are there after it; on this stream they are copied to the host.
  Fence ready{};
  MaybeStream stream{};

  // Added in microbatch order to `before`, the sum of the microbatches before the first.
  at::Tensor sum(at::Tensor before = {}) const;
  // Makes them tensors of the CPU, by one copy. Waits for the device.
  void take_to_host();
  // On the CPU in double precision: the loss, then the metrics. `before`: the same of the
  // microbatches before the first.
  at::Tensor numbers(const at::Tensor& before = {}) const;
};

}  // namespace pd2
