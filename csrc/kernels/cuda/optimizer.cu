#include "kernels/optimizer.h"
#include "kernels/optimizer_coefficients.h"
#include "kernels/optimizer_steps.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace pd2::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 8;  // 2048 threads, all that one can hold

// One number, with every rounding named: nvcc would otherwise fuse products and sums.
struct Float {
  using Scalar = float;
  float v;
  __host__ __device__ static Float broadcast(float x) { return {x}; }
};

__device__ Float add(Float a, Float b) { return {__fadd_rn(a.v, b.v)}; }
__device__ Float subtract(Float a, Float b) { return {__fsub_rn(a.v, b.v)}; }
__device__ Float multiply(Float a, Float b) { return {__fmul_rn(a.v, b.v)}; }
__device__ Float divide(Float a, Float b) { return {__fdiv_rn(a.v, b.v)}; }
__device__ Float fma(Float a, Float b, Float c) { return {__fmaf_rn(a.v, b.v, c.v)}; }
__device__ Float sqrt(Float a) { return {__fsqrt_rn(a.v)}; }

struct Double {
  using Scalar = double;
  double v;
  __host__ __device__ static Double broadcast(double x) { return {x}; }
};

__device__ Double add(Double a, Double b) { return {__dadd_rn(a.v, b.v)}; }
__device__ Double subtract(Double a, Double b) { return {__dsub_rn(a.v, b.v)}; }
__device__ Double multiply(Double a, Double b) { return {__dmul_rn(a.v, b.v)}; }
__device__ Double divide(Double a, Double b) { return {__ddiv_rn(a.v, b.v)}; }
__device__ Double fma(Double a, Double b, Double c) { return {__fma_rn(a.v, b.v, c.v)}; }
__device__ Double sqrt(Double a) { return {__dsqrt_rn(a.v)}; }

template <typename V>
__device__ V negate(V a) {
  return {-a.v};
}
template <typename V>
__device__ V max(V a, V b) {
  return a.v > b.v || isnan(a.v) ? a : b;
}

template <typename T, int kStates>
struct Arrays {
  const T* w;
  const T* g;
  T* w_out;
  T* state[kStates + 1];  // the last is unused: no array is empty
};

template <typename T, int kWidth>
struct alignas(sizeof(T) * kWidth) Pack {
  T lane[kWidth];
};

// Steps kWidth neighbours with one load and one store for each array. Everything is read before
// anything is written: w_out may be w or g.
template <int kWidth, typename V, int kStates, typename Step>
__device__ void step_pack(const Arrays<typename V::Scalar, kStates>& a, std::int64_t i,
                          const Step& step) {
  using P = Pack<typename V::Scalar, kWidth>;
  const P w = *reinterpret_cast<const P*>(a.w + i);
  const P g = *reinterpret_cast<const P*>(a.g + i);
  P state[kStates + 1];
#pragma unroll
  for (int s = 0; s < kStates; ++s) state[s] = *reinterpret_cast<const P*>(a.state[s] + i);
  P w_out;
#pragma unroll
  for (int lane = 0; lane < kWidth; ++lane) {
    V numbers[kStates + 1];
#pragma unroll
    for (int s = 0; s < kStates; ++s) numbers[s] = {state[s].lane[lane]};
    w_out.lane[lane] = step.template step<kStates>(V{w.lane[lane]}, V{g.lane[lane]}, numbers).v;
#pragma unroll
    for (int s = 0; s < kStates; ++s) state[s].lane[lane] = numbers[s].v;
  }
#pragma unroll
  for (int s = 0; s < kStates; ++s) *reinterpret_cast<P*>(a.state[s] + i) = state[s];
  *reinterpret_cast<P*>(a.w_out + i) = w_out;
}

template <int kWidth, typename V, int kStates, typename Step>
__global__ void __launch_bounds__(kThreads)
    step_kernel(Arrays<typename V::Scalar, kStates> a, std::int64_t n, Step step) {
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kThreads;
  const std::int64_t thread = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const std::int64_t packs = n / kWidth;
  for (std::int64_t i = thread; i < packs; i += stride) {
    step_pack<kWidth, V>(a, i * kWidth, step);
  }
  for (std::int64_t i = packs * kWidth + thread; i < n; i += stride) step_pack<1, V>(a, i, step);
}

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
  }
}

unsigned int num_blocks(std::int64_t num_packs) {
  int device = 0;
  int multiprocessors = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
        "cudaDeviceGetAttribute");
  const std::int64_t useful = (num_packs + kThreads - 1) / kThreads;
  const std::int64_t resident = std::int64_t{multiprocessors} * kBlocksPerMultiprocessor;
  return static_cast<unsigned int>(std::max<std::int64_t>(1, std::min(useful, resident)));
}

template <typename V, int kStates, typename Step>
void launch(const Arrays<typename V::Scalar, kStates>& a, std::int64_t n, const Step& step,
            void* stream) {
  if (n <= 0) return;
  constexpr int kWidth = 16 / static_cast<int>(sizeof(typename V::Scalar));
  const auto aligned = [](const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; };
  bool all_aligned = aligned(a.w) && aligned(a.g) && aligned(a.w_out);
  for (int s = 0; s < kStates; ++s) all_aligned = all_aligned && aligned(a.state[s]);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (all_aligned) {
    const unsigned int blocks = num_blocks((n + kWidth - 1) / kWidth);
    step_kernel<kWidth, V><<<blocks, kThreads, 0, cuda_stream>>>(a, n, step);
  } else {
    step_kernel<1, V><<<num_blocks(n), kThreads, 0, cuda_stream>>>(a, n, step);
  }
  check(cudaGetLastError(), "optimizer kernel");
}

template <typename V, typename T = typename V::Scalar>
void launch_sgd(const T* w, const T* g, T* momentum_buffer, T* w_out, std::int64_t n,
                const SgdOptions& options, void* stream) {
  const SgdStep<V> step(round_coefficients<T>(options));
  if (options.momentum != 0.0) {
    launch<V>(Arrays<T, 1>{w, g, w_out, {momentum_buffer}}, n, step, stream);
  } else {
    launch<V>(Arrays<T, 0>{w, g, w_out, {}}, n, step, stream);
  }
}

template <typename V, typename T = typename V::Scalar>
void launch_adam(const T* w, const T* g, T* exp_avg, T* exp_avg_sq, T* max_exp_avg_sq, T* w_out,
                 std::int64_t n, const AdamOptions& options, void* stream) {
  const AdamStep<V> step(round_coefficients<T>(options));
  if (options.amsgrad) {
    launch<V>(Arrays<T, 3>{w, g, w_out, {exp_avg, exp_avg_sq, max_exp_avg_sq}}, n, step, stream);
  } else {
    launch<V>(Arrays<T, 2>{w, g, w_out, {exp_avg, exp_avg_sq}}, n, step, stream);
  }
}

}  // namespace

template <>
void sgd_cuda(const float* w, const float* g, float* momentum_buffer, float* w_out, std::int64_t n,
              const SgdOptions& options, void* stream) {
  launch_sgd<Float>(w, g, momentum_buffer, w_out, n, options, stream);
}

template <>
void sgd_cuda(const double* w, const double* g, double* momentum_buffer, double* w_out,
              std::int64_t n, const SgdOptions& options, void* stream) {
  launch_sgd<Double>(w, g, momentum_buffer, w_out, n, options, stream);
}

template <>
void adam_cuda(const float* w, const float* g, float* exp_avg, float* exp_avg_sq,
               float* max_exp_avg_sq, float* w_out, std::int64_t n, const AdamOptions& options,
               void* stream) {
  launch_adam<Float>(w, g, exp_avg, exp_avg_sq, max_exp_avg_sq, w_out, n, options, stream);
}

template <>
void adam_cuda(const double* w, const double* g, double* exp_avg, double* exp_avg_sq,
               double* max_exp_avg_sq, double* w_out, std::int64_t n, const AdamOptions& options,
               void* stream) {
  launch_adam<Double>(w, g, exp_avg, exp_avg_sq, max_exp_avg_sq, w_out, n, options, stream);
}

void copy_cuda(const void* from, void* to, std::int64_t bytes, void* stream) {
  check(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToDevice,
                        static_cast<cudaStream_t>(stream)),
        "cudaMemcpyAsync");
}

}  // namespace pd2::kernels
