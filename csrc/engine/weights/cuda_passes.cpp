// CUDA's passes, and the current stream for their launches.
#ifdef PD2_WITH_CUDA

#include "engine/weights/grid_passes.h"

#include <c10/cuda/CUDAStream.h>

namespace pd2 {
namespace {

GridDevice current_cuda_device() {
  return {kernels::cuda_kernels(), c10::cuda::getCurrentCUDAStream().stream(),
          /*pins_memory=*/true};
}

[[maybe_unused]] const bool kHasPasses = [] {
  by_device_type<DevicePasses>().set(
      c10::DeviceType::CUDA, {[](const FlatStep& step, at::Tensor& table) {
                                upload_on_grid(step, table, current_cuda_device());
                              },
                              [](const FlatStep& step, const at::Tensor& table) {
                                step_on_grid(step, table, current_cuda_device());
                              },
                              [](const std::vector<at::Tensor>& tensors, double norm_type) {
                                return norms_on_grid(tensors, norm_type, current_cuda_device());
                              }});
  return true;
}();

}  // namespace
}  // namespace pd2

#endif
