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

// Blocks that step which a multiprocessor holds at least: their threads' numbers fit into its
// registers.
template <typename Arrays>
constexpr int kBlocks = Arrays::kHasFewNumbers ? 4 : 2;

template <typename Step, typename Arrays>
__global__ void __launch_bounds__(kThreads, kBlocks<Arrays>) step_kernel(Arrays arrays) {
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

// A block for each chunk: threads that wait for their first numbers are then always few of many.
template <typename... Arguments>
void launch(void (*kernel)(Arguments...), std::int64_t blocks, void* stream,
            const Arguments&... arguments) {
  kernel<<<static_cast<unsigned int>(std::max<std::int64_t>(blocks, 1)), kThreads, 0,
           static_cast<cudaStream_t>(stream)>>>(arguments...);
  check(cudaGetLastError(), "optimizer kernel");
}

void launch_step(const StepLaunch& given, void* stream) {
  visit_step(given,
             [&]<typename Arrays, typename Step>(const Arrays& arrays, std::type_identity<Step>) {
               launch(step_kernel<Step, Arrays>, given.num_chunks, stream, arrays);
             });
}

void launch_norms(const NormLaunch& given, void* stream) {
  visit_norm(given, [&]<NormKind kKind, typename T>(std::integral_constant<NormKind, kKind>,
                                                    std::type_identity<T>) {
    launch(sum_kernel<kKind, T>, given.num_chunks, stream, given);
    launch(finish_kernel<kKind, T>, given.num_arrays, stream, given);
  });
}

}  // namespace

const GridKernels& cuda_kernels() {
  static constexpr GridKernels kKernels{&launch_step, &launch_norms};
  return kKernels;
}

}  // namespace pd2::kernels
