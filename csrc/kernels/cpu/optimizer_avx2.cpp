#include "kernels/cpu/optimizer_passes.h"

#if defined(__x86_64__)

#include <cmath>  // here, as what headers define inline is compiled for the instruction set below
#include <cstdint>
#include <immintrin.h>
#include <type_traits>

#if defined(__clang__)
#pragma clang fp contract(off)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
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

  static Floats load_bfloat16(const std::uint16_t* p) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_halves(p)), 16))};
  }
  template <HalfFormat kFormat, bool kStream>
  void store_half(std::uint16_t* p) const {
    store_halves<kStream>(p, kFormat == HalfFormat::kBfloat16
                                 ? to_bfloat16()
                                 : _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }
  static Floats join(const std::uint16_t* high, const std::int16_t* remainder) {
    const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu16_epi32(load_halves(high)), 16);
    const __m256i rest = _mm256_cvtepi16_epi32(load_halves(remainder));
    return {_mm256_castsi256_ps(_mm256_add_epi32(bits, rest))};
  }
  template <bool kStream>
  void split(std::uint16_t* high, std::int16_t* remainder) const {
    const __m256i given = _mm256_castps_si256(v);
    const __m256i bits = _mm256_blendv_epi8(given, _mm256_set1_epi32(0x7FC00000), is_nan());
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_set1_epi32(0x8000));
    store_halves<kStream>(high, narrow(_mm256_srli_epi32(rounded, 16)));
    const __m256i rest = _mm256_and_si256(bits, _mm256_set1_epi32(0xFFFF));
    store_halves<false>(remainder, narrow(rest));
  }

 private:
  template <typename T>
  static __m128i load_halves(const T* p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  }
  template <bool kStream, typename T>
  static void store_halves(T* p, __m128i halves) {
    if constexpr (kStream) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(p), halves);
    } else {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(p), halves);
    }
  }
  // The lower halves of numbers below 2^16.
  static __m128i narrow(__m256i numbers) {
    const __m256i packed = _mm256_packus_epi32(numbers, numbers);  // in each half of the register
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0b1000));
  }
  __m256i is_nan() const { return _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)); }
  __m128i to_bfloat16() const {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i high = _mm256_srli_epi32(bits, 16);
    const __m256i half =
        _mm256_add_epi32(_mm256_and_si256(high, _mm256_set1_epi32(1)), _mm256_set1_epi32(0x7FFF));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
    const __m256i nan = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
    return narrow(_mm256_blendv_epi8(rounded, nan, is_nan()));
  }
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

template <typename Weights>
Passes<Weights> avx2_passes() {
  using V = std::conditional_t<std::is_same_v<typename Weights::Scalar, float>, Floats, Doubles>;
  return passes<V, Weights>();
}
template Passes<PlainWeights<float>> avx2_passes();
template Passes<PlainWeights<double>> avx2_passes();
template Passes<MasterWeights<HalfFormat::kBfloat16>> avx2_passes();
template Passes<MasterWeights<HalfFormat::kFloat16>> avx2_passes();
template Passes<SplitWeights> avx2_passes();
template Passes<Bfloat16Gradients<MasterWeights<HalfFormat::kBfloat16>>> avx2_passes();
template Passes<Bfloat16Gradients<SplitWeights>> avx2_passes();

}  // namespace pd2::kernels

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // x86-64
