#include "kernels/cpu/optimizer_passes.h"

#if defined(__x86_64__)

#include <cstdint>
#include <immintrin.h>

#if defined(__clang__)
#pragma clang fp contract(off)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#pragma GCC optimize("fp-contract=off")
#endif

#include "kernels/cpu/optimizer_loops.h"

namespace pd2::kernels {
namespace {

struct Floats {
  using Scalar = float;
  static constexpr std::int64_t kWidth = 8;
  __m256 v;

  static Floats load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static Floats broadcast(float x) { return {_mm256_set1_ps(x)}; }
  void store(float* p) const { _mm256_storeu_ps(p, v); }
  void stream(float* p) const { _mm256_stream_ps(p, v); }
  static void finish_streaming() { _mm_sfence(); }
};

inline Floats add(Floats a, Floats b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Floats subtract(Floats a, Floats b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Floats multiply(Floats a, Floats b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Floats divide(Floats a, Floats b) { return {_mm256_div_ps(a.v, b.v)}; }
inline Floats fma(Floats a, Floats b, Floats c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Floats sqrt(Floats a) { return {_mm256_sqrt_ps(a.v)}; }
inline Floats negate(Floats a) { return {_mm256_xor_ps(a.v, _mm256_set1_ps(-0.0F))}; }
// The instruction gives its second operand if either is NaN.
inline Floats max(Floats a, Floats b) {
  const __m256 nan = _mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q);
  return {_mm256_blendv_ps(_mm256_max_ps(a.v, b.v), a.v, nan)};
}

struct Doubles {
  using Scalar = double;
  static constexpr std::int64_t kWidth = 4;
  __m256d v;

  static Doubles load(const double* p) { return {_mm256_loadu_pd(p)}; }
  static Doubles broadcast(double x) { return {_mm256_set1_pd(x)}; }
  void store(double* p) const { _mm256_storeu_pd(p, v); }
  void stream(double* p) const { _mm256_stream_pd(p, v); }
  static void finish_streaming() { _mm_sfence(); }
};

inline Doubles add(Doubles a, Doubles b) { return {_mm256_add_pd(a.v, b.v)}; }
inline Doubles subtract(Doubles a, Doubles b) { return {_mm256_sub_pd(a.v, b.v)}; }
inline Doubles multiply(Doubles a, Doubles b) { return {_mm256_mul_pd(a.v, b.v)}; }
inline Doubles divide(Doubles a, Doubles b) { return {_mm256_div_pd(a.v, b.v)}; }
inline Doubles fma(Doubles a, Doubles b, Doubles c) { return {_mm256_fmadd_pd(a.v, b.v, c.v)}; }
inline Doubles sqrt(Doubles a) { return {_mm256_sqrt_pd(a.v)}; }
inline Doubles negate(Doubles a) { return {_mm256_xor_pd(a.v, _mm256_set1_pd(-0.0))}; }
// The instruction gives its second operand if either is NaN.
inline Doubles max(Doubles a, Doubles b) {
  const __m256d nan = _mm256_cmp_pd(a.v, a.v, _CMP_UNORD_Q);
  return {_mm256_blendv_pd(_mm256_max_pd(a.v, b.v), a.v, nan)};
}

}  // namespace

template <>
Passes<float> avx2_passes<float>() {
  return passes<Floats>();
}

template <>
Passes<double> avx2_passes<double>() {
  return passes<Doubles>();
}

}  // namespace pd2::kernels

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // x86-64
