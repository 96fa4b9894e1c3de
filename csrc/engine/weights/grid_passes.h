// The passes of devices whose kernels are grids of threads: tables are uploaded, kernels launched.
#pragma once

#include "engine/weights/device_passes.h"

namespace pd2 {

struct GridDevice {
  const kernels::GridKernels& kernels;
  void* stream;      // the current one, as the kernels take it
  bool pins_memory;  // the host's, for copies that the host does not wait for
};

void upload_on_grid(const FlatStep& step, at::Tensor& table, const GridDevice& device);
void step_on_grid(const FlatStep& step, const at::Tensor& table, const GridDevice& device);
at::Tensor norms_on_grid(const std::vector<at::Tensor>& tensors, double norm_type,
                         const GridDevice& device);

}  // namespace pd2
