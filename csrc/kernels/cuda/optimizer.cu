#include "kernels/half.h"
#include "kernels/optimizer.h"
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
template <typename T>
struct Number {
  using Scalar = T;
  T v;
  __host__ __device__ static Number broadcast(T x) { return {x}; }
};
using Float = Number<float>;
using Double = Number<double>;

__device__ Float add(Float a, Float b) { return {__fadd_rn(a.v, b.v)}; }
__device__ Float subtract(Float a, Float b) { return {__fsub_rn(a.v, b.v)}; }
__device__ Float multiply(Float a, Float b) { return {__fmul_rn(a.v, b.v)}; }
__device__ Float divide(Float a, Float b) { return {__fdiv_rn(a.v, b.v)}; }
__device__ Float fma(Float a, Float b, Float c) { return {__fmaf_rn(a.v, b.v, c.v)}; }
__device__ Float sqrt(Float a) { return {__fsqrt_rn(a.v)}; }

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

template <typename T, int kWidth>
struct alignas(sizeof(T) * kWidth) Pack {
  T lane[kWidth];
};

template <int kWidth, typename T>
__device__ Pack<T, kWidth> read(const T* p) {
  return *reinterpret_cast<const Pack<T, kWidth>*>(p);
}
template <int kWidth, typename T>
__device__ void write(T* p, const Pack<T, kWidth>& pack) {
  *reinterpret_cast<Pack<T, kWidth>*>(p) = pack;
}

// How neighbours of each kind of weights are read and written.

template <int kWidth, typename T>
__device__ Pack<T, kWidth> load_weights(const PlainWeights<T>& a, std::int64_t i) {
  return read<kWidth>(a.w + i);
}
template <int kWidth, HalfFormat kFormat>
__device__ Pack<float, kWidth> load_weights(const MasterWeights<kFormat>& a, std::int64_t i) {
  return read<kWidth>(a.master + i);
}
template <int kWidth>
__device__ Pack<float, kWidth> load_weights(const SplitWeights& a, std::int64_t i) {
  const auto high = read<kWidth>(a.w + i);
  const auto remainder = read<kWidth>(a.remainder + i);
  Pack<float, kWidth> w;
#pragma unroll
  for (int lane = 0; lane < kWidth; ++lane) {
    w.lane[lane] = join({high.lane[lane], remainder.lane[lane]});
  }
  return w;
}

template <int kWidth, typename T>
__device__ void store_weights(const PlainWeights<T>& a, std::int64_t i, const Pack<T, kWidth>& w) {
  write(a.w_out + i, w);
}
template <int kWidth, HalfFormat kFormat>
__device__ void store_weights(const MasterWeights<kFormat>& a, std::int64_t i,
                              const Pack<float, kWidth>& w) {
  Pack<std::uint16_t, kWidth> half;
#pragma unroll
  for (int lane = 0; lane < kWidth; ++lane) {
    half.lane[lane] =
        kFormat == HalfFormat::kBfloat16 ? bfloat16_bits(w.lane[lane]) : float16_bits(w.lane[lane]);
  }
  write(a.master + i, w);
  write(a.w_out + i, half);
}
template <int kWidth>
__device__ void store_weights(const SplitWeights& a, std::int64_t i, const Pack<float, kWidth>& w) {
  Pack<std::uint16_t, kWidth> high;
  Pack<std::int16_t, kWidth> remainder;
#pragma unroll
  for (int lane = 0; lane < kWidth; ++lane) {
    const SplitFloat parts = split(w.lane[lane]);
    high.lane[lane] = parts.high;
    remainder.lane[lane] = parts.remainder;
  }
  write(a.w_out + i, high);
  write(a.remainder + i, remainder);
}

// Steps kWidth neighbours with one load and one store for each array. Everything is read before
// anything is written: w_out may be w or g.
template <int kWidth, typename V, typename Weights, int kStates, typename Step>
__device__ void step_pack(const Arrays<Weights, kStates>& a, std::int64_t i, const Step& step) {
  using P = Pack<typename V::Scalar, kWidth>;
  const P w = load_weights<kWidth>(a.weights, i);
  const P g = read<kWidth>(a.g + i);
  P state[kStates + 1];
#pragma unroll
  for (int s = 0; s < kStates; ++s) state[s] = read<kWidth>(a.state[s] + i);
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
  for (int s = 0; s < kStates; ++s) write(a.state[s] + i, state[s]);
  store_weights(a.weights, i, w_out);
}

template <int kWidth, typename V, typename Weights, int kStates, typename Step>
__global__ void __launch_bounds__(kThreads)
    step_kernel(Arrays<Weights, kStates> a, std::int64_t n, Step step) {
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

// Whether kWidth neighbours can be read at once.
template <int kWidth, typename T>
bool aligned(const T* array) {
  return reinterpret_cast<std::uintptr_t>(array) % (kWidth * sizeof(T)) == 0;
}
template <int kWidth, typename T>
bool weights_aligned(const PlainWeights<T>& a) {
  return aligned<kWidth>(a.w) && aligned<kWidth>(a.w_out);
}
template <int kWidth, HalfFormat kFormat>
bool weights_aligned(const MasterWeights<kFormat>& a) {
  return aligned<kWidth>(a.master) && aligned<kWidth>(a.w_out);
}
template <int kWidth>
bool weights_aligned(const SplitWeights& a) {
  return aligned<kWidth>(a.w) && aligned<kWidth>(a.remainder) && aligned<kWidth>(a.w_out);
}

template <typename V, typename Weights, int kStates, typename Step>
void launch(const Arrays<Weights, kStates>& a, std::int64_t n, const Step& step, void* stream) {
  if (n <= 0) return;
  constexpr int kWidth = 16 / static_cast<int>(sizeof(typename V::Scalar));
  bool all_aligned = weights_aligned<kWidth>(a.weights) && aligned<kWidth>(a.g);
  for (int s = 0; s < kStates; ++s) all_aligned = all_aligned && aligned<kWidth>(a.state[s]);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (all_aligned) {
    const unsigned int blocks = num_blocks((n + kWidth - 1) / kWidth);
    step_kernel<kWidth, V><<<blocks, kThreads, 0, cuda_stream>>>(a, n, step);
  } else {
    step_kernel<1, V><<<num_blocks(n), kThreads, 0, cuda_stream>>>(a, n, step);
  }
  check(cudaGetLastError(), "optimizer kernel");
}

}  // namespace

template <typename Weights, typename T>
void sgd_cuda(const Weights& weights, const T* g, T* momentum_buffer, std::int64_t n,
              const SgdOptions& options, void* stream) {
  using V = Number<T>;
  const SgdStep<V> step(options);
  if (options.momentum != 0.0) {
    launch<V>(Arrays<Weights, 1>{weights, g, {momentum_buffer}}, n, step, stream);
  } else {
    launch<V>(Arrays<Weights, 0>{weights, g, {}}, n, step, stream);
  }
}

template <typename Weights, typename T>
void adam_cuda(const Weights& weights, const T* g, T* exp_avg, T* exp_avg_sq, T* max_exp_avg_sq,
               std::int64_t n, const AdamOptions& options, void* stream) {
  using V = Number<T>;
  const AdamStep<V> step(options);
  if (options.amsgrad) {
    launch<V>(Arrays<Weights, 3>{weights, g, {exp_avg, exp_avg_sq, max_exp_avg_sq}}, n, step,
              stream);
  } else {
    launch<V>(Arrays<Weights, 2>{weights, g, {exp_avg, exp_avg_sq}}, n, step, stream);
  }
}

#define PD2_INSTANTIATE(Weights, T)                                                               \
  template void sgd_cuda(const Weights&, const T*, T*, std::int64_t, const SgdOptions&, void*);   \
  template void adam_cuda(const Weights&, const T*, T*, T*, T*, std::int64_t, const AdamOptions&, \
                          void*);
PD2_INSTANTIATE(PlainWeights<float>, float)
PD2_INSTANTIATE(PlainWeights<double>, double)
PD2_INSTANTIATE(MasterWeights<HalfFormat::kBfloat16>, float)
PD2_INSTANTIATE(MasterWeights<HalfFormat::kFloat16>, float)
PD2_INSTANTIATE(SplitWeights, float)
#undef PD2_INSTANTIATE

void copy_cuda(const void* from, void* to, std::int64_t bytes, void* stream) {
  check(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToDevice,
                        static_cast<cudaStream_t>(stream)),
        "cudaMemcpyAsync");
}

}  // namespace pd2::kernels
