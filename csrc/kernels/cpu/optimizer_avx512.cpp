#include "kernels/cpu/optimizer_passes.h"

#if defined(__x86_64__)

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

#include "kernels/cpu/optimizer_loops.h"

namespace pd2::kernels {
namespace {

// The unmasked intrinsics of sqrt and max read an undefined vector, which GCC 12 warns about.
constexpr __mmask16 kAll16 = 0xFFFF;
constexpr __mmask8 kAll8 = 0xFF;

struct Floats {
  using Scalar = float;
  static constexpr std::int64_t kWidth = 16;
  __m512 v;

  static Floats load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Floats broadcast(float x) { return {_mm512_set1_ps(x)}; }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  void stream(float* p) const { _mm512_stream_ps(p, v); }
  static void finish_streaming() { _mm_sfence(); }
};

inline Floats add(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Floats subtract(Floats a, Floats b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Floats multiply(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Floats divide(Floats a, Floats b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Floats sqrt(Floats a) { return {_mm512_maskz_sqrt_ps(kAll16, a.v)}; }
inline Floats negate(Floats a) { return {_mm512_xor_ps(a.v, _mm512_set1_ps(-0.0F))}; }
// The instruction gives its second operand if either is NaN.
inline Floats max(Floats a, Floats b) {
  const __mmask16 number = _mm512_cmp_ps_mask(a.v, a.v, _CMP_ORD_Q);
  return {_mm512_mask_max_ps(a.v, number, a.v, b.v)};
}

struct Doubles {
  using Scalar = double;
  static constexpr std::int64_t kWidth = 8;
  __m512d v;

  static Doubles load(const double* p) { return {_mm512_loadu_pd(p)}; }
  static Doubles broadcast(double x) { return {_mm512_set1_pd(x)}; }
  void store(double* p) const { _mm512_storeu_pd(p, v); }
  void stream(double* p) const { _mm512_stream_pd(p, v); }
  static void finish_streaming() { _mm_sfence(); }
};

inline Doubles add(Doubles a, Doubles b) { return {_mm512_add_pd(a.v, b.v)}; }
inline Doubles subtract(Doubles a, Doubles b) { return {_mm512_sub_pd(a.v, b.v)}; }
inline Doubles multiply(Doubles a, Doubles b) { return {_mm512_mul_pd(a.v, b.v)}; }
inline Doubles divide(Doubles a, Doubles b) { return {_mm512_div_pd(a.v, b.v)}; }
inline Doubles fma(Doubles a, Doubles b, Doubles c) { return {_mm512_fmadd_pd(a.v, b.v, c.v)}; }
inline Doubles sqrt(Doubles a) { return {_mm512_maskz_sqrt_pd(kAll8, a.v)}; }
inline Doubles negate(Doubles a) { return {_mm512_xor_pd(a.v, _mm512_set1_pd(-0.0))}; }
// The instruction gives its second operand if either is NaN.
inline Doubles max(Doubles a, Doubles b) {
  const __mmask8 number = _mm512_cmp_pd_mask(a.v, a.v, _CMP_ORD_Q);
  return {_mm512_mask_max_pd(a.v, number, a.v, b.v)};
}

}  // namespace

template <>
Passes<float> avx512_passes<float>() {
  return passes<Floats>();
}

template <>
Passes<double> avx512_passes<double>() {
  return passes<Doubles>();
}

}  // namespace pd2::kernels

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // x86-64
