#include "kernels/cpu/optimizer_passes.h"

#if defined(__x86_64__)

#include <cmath>  // here, as what headers define inline is compiled for the instruction set below
#include <cstdint>
#include <immintrin.h>

#if defined(__clang__)
#pragma clang fp contract(off)
#pragma clang attribute push(__attribute__((target("avx512f,avx512dq,avx2,fma"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512dq,avx2,fma")
#pragma GCC optimize("fp-contract=off")
#endif

namespace pd2::kernels {
namespace {

constexpr int kVectorBytes = 64;
constexpr int kUnrolled = 16;
constexpr bool kStreams = true;
// The unmasked intrinsics of roots and conversions read an undefined vector, which GCC 12 warns of.
constexpr __mmask16 kAll16 = 0xFFFF;
constexpr __mmask8 kAll8 = 0xFF;

inline __m512 fused(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
inline __m512d fused(__m512d a, __m512d b, __m512d c) { return _mm512_fmadd_pd(a, b, c); }
inline __m512 root(__m512 a) { return _mm512_maskz_sqrt_ps(kAll16, a); }
inline __m512d root(__m512d a) { return _mm512_maskz_sqrt_pd(kAll8, a); }
inline __m256i float16_of(__m512 a) {
  return _mm512_maskz_cvtps_ph(kAll16, a, _MM_FROUND_TO_NEAREST_INT);
}
template <typename Register>
inline void stream(void* p, Register a) {
  if constexpr (sizeof(a) == sizeof(__m512i)) {
    _mm512_stream_si512(static_cast<__m512i*>(p), (__m512i)a);
  } else {
    _mm256_stream_si256(static_cast<__m256i*>(p), (__m256i)a);
  }
}
inline void finish_streaming() { _mm_sfence(); }

}  // namespace
}  // namespace pd2::kernels

#include "kernels/cpu/optimizer_loops.h"

namespace pd2::kernels {

const AllPasses& avx512_passes() { return kAllPasses; }

}  // namespace pd2::kernels

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // x86-64
