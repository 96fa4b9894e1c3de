#include "kernels/cpu/optimizer_passes.h"

#if defined(__x86_64__)

#include <cmath>  // here, as what headers define inline is compiled for the instruction set below
#include <cstdint>
#include <immintrin.h>

#if defined(__clang__)
#pragma clang fp contract(off)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#pragma GCC optimize("fp-contract=off")
#endif

namespace pd2::kernels {
namespace {

constexpr int kVectorBytes = 32;
constexpr int kUnrolled = 16;
constexpr bool kStreams = true;
inline __m256 fused(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
inline __m256d fused(__m256d a, __m256d b, __m256d c) { return _mm256_fmadd_pd(a, b, c); }
inline __m256 root(__m256 a) { return _mm256_sqrt_ps(a); }
inline __m256d root(__m256d a) { return _mm256_sqrt_pd(a); }
inline __m128i float16_of(__m256 a) { return _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT); }
template <typename Register>
inline void stream(void* p, Register a) {
  if constexpr (sizeof(a) == sizeof(__m256i)) {
    _mm256_stream_si256(static_cast<__m256i*>(p), (__m256i)a);
  } else {
    _mm_stream_si128(static_cast<__m128i*>(p), (__m128i)a);
  }
}
inline void finish_streaming() { _mm_sfence(); }

}  // namespace
}  // namespace pd2::kernels

#include "kernels/cpu/optimizer_loops.h"

namespace pd2::kernels {

const AllPasses& avx2_passes() { return kAllPasses; }

}  // namespace pd2::kernels

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // x86-64
