#include "kernels/grid/launch.h"
#include "kernels/grid/norm.h"
#include "kernels/grid/step.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace pd2::kernels {
namespace {

// Blocks that step which a multiprocessor holds at least.
constexpr int kBlocks = 4;

template <typename Step, typename Arrays>
__global__ void __launch_bounds__(kStepThreads, kBlocks) step_kernel(Arrays arrays) {
  step_thread<Step>(arrays, {blockIdx.x, gridDim.x, static_cast<int>(threadIdx.x)});
}

template <NormKind kKind, typename T>
__global__ void __launch_bounds__(kThreads) sum_kernel(NormLaunch launch) {
  __shared__ double of_threads[kThreads];
  sum_chunks<kKind, T>(launch, blockIdx.x, gridDim.x, of_threads);
}

template <NormKind kKind, typename T>
__global__ void __launch_bounds__(kThreads) finish_kernel(NormLaunch launch) {
  __shared__ double of_threads[kThreads];
  finish_norms<kKind, T>(launch, blockIdx.x, gridDim.x, of_threads);
}

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
  }
}

// As many blocks as there is work for, at most as many as the device holds at once.
template <typename... Arguments>
void launch(void (*kernel)(Arguments...), int threads, std::int64_t useful, void* stream,
            const Arguments&... arguments) {
  int device = 0, multiprocessors = 0, per_multiprocessor = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
        "cudaDeviceGetAttribute");
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, kernel, threads, 0),
        "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  const std::int64_t resident = std::int64_t{multiprocessors} * std::max(1, per_multiprocessor);
  const auto blocks = static_cast<unsigned int>(std::clamp<std::int64_t>(useful, 1, resident));
  kernel<<<blocks, threads, 0, static_cast<cudaStream_t>(stream)>>>(arguments...);
  check(cudaGetLastError(), "optimizer kernel");
}

void launch_step(const StepLaunch& given, void* stream) {
  visit_step(given,
             [&]<typename Arrays, typename Step>(const Arrays& arrays, std::type_identity<Step>) {
               launch(step_kernel<Step, Arrays>, kStepThreads, given.num_chunks, stream, arrays);
             });
}

void launch_norms(const NormLaunch& given, void* stream) {
  visit_norm(given, [&]<NormKind kKind, typename T>(std::integral_constant<NormKind, kKind>,
                                                    std::type_identity<T>) {
    launch(sum_kernel<kKind, T>, kThreads, given.num_chunks, stream, given);
    launch(finish_kernel<kKind, T>, kThreads, given.num_arrays, stream, given);
  });
}

}  // namespace

const GridKernels& cuda_kernels() {
  static constexpr GridKernels kKernels{&launch_step, &launch_norms};
  return kKernels;
}

}  // namespace pd2::kernels
