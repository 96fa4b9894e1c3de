#include "kernels/cpu/optimizer_passes.h"

#if defined(__x86_64__)

#include <cmath>  // here, as what headers define inline is compiled for the instruction set below
#include <cstdint>
#include <immintrin.h>
#include <type_traits>

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

  static Floats load_bfloat16(const std::uint16_t* p) {
    const __m512i wide = _mm512_maskz_cvtepu16_epi32(kAll16, load_halves(p));
    return {_mm512_castsi512_ps(_mm512_maskz_slli_epi32(kAll16, wide, 16))};
  }
  template <HalfFormat kFormat, bool kStream>
  void store_half(std::uint16_t* p) const {
    store_halves<kStream>(p, kFormat == HalfFormat::kBfloat16
                                 ? to_bfloat16()
                                 : _mm512_maskz_cvtps_ph(kAll16, v, _MM_FROUND_TO_NEAREST_INT));
  }
  static Floats join(const std::uint16_t* high, const std::int16_t* remainder) {
    const __m512i wide = _mm512_maskz_cvtepu16_epi32(kAll16, load_halves(high));
    const __m512i rest = _mm512_maskz_cvtepi16_epi32(kAll16, load_halves(remainder));
    return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_maskz_slli_epi32(kAll16, wide, 16), rest))};
  }
  template <bool kStream>
  void split(std::uint16_t* high, std::int16_t* remainder) const {
    const __m512i bits =
        _mm512_mask_mov_epi32(_mm512_castps_si512(v), is_nan(), _mm512_set1_epi32(0x7FC00000));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_set1_epi32(0x8000));
    store_halves<kStream>(high, narrow(_mm512_maskz_srli_epi32(kAll16, rounded, 16)));
    store_halves<false>(remainder, narrow(bits));
  }

 private:
  template <typename T>
  static __m256i load_halves(const T* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  template <bool kStream, typename T>
  static void store_halves(T* p, __m256i halves) {
    if constexpr (kStream) {
      _mm256_stream_si256(reinterpret_cast<__m256i*>(p), halves);
    } else {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), halves);
    }
  }
  // The lower halves.
  static __m256i narrow(__m512i numbers) { return _mm512_maskz_cvtepi32_epi16(kAll16, numbers); }
  __mmask16 is_nan() const { return _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q); }
  __m256i to_bfloat16() const {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i high = _mm512_maskz_srli_epi32(kAll16, bits, 16);
    const __m512i half =
        _mm512_add_epi32(_mm512_and_si512(high, _mm512_set1_epi32(1)), _mm512_set1_epi32(0x7FFF));
    const __m512i rounded = _mm512_maskz_srli_epi32(kAll16, _mm512_add_epi32(bits, half), 16);
    return narrow(_mm512_mask_or_epi32(rounded, is_nan(), high, _mm512_set1_epi32(0x40)));
  }
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

template <typename Weights>
Passes<Weights> avx512_passes() {
  using V = std::conditional_t<std::is_same_v<typename Weights::Scalar, float>, Floats, Doubles>;
  return passes<V, Weights>();
}
template Passes<PlainWeights<float>> avx512_passes();
template Passes<PlainWeights<double>> avx512_passes();
template Passes<MasterWeights<HalfFormat::kBfloat16>> avx512_passes();
template Passes<MasterWeights<HalfFormat::kFloat16>> avx512_passes();
template Passes<SplitWeights> avx512_passes();
template Passes<Bfloat16Gradients<MasterWeights<HalfFormat::kBfloat16>>> avx512_passes();
template Passes<Bfloat16Gradients<SplitWeights>> avx512_passes();

}  // namespace pd2::kernels

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // x86-64
