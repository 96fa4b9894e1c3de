// For machines without a path of their own. A vector is an array of 16 bytes: compilers turn the
// loops over it into the machine's vectors where it has them (NEON), else into scalar code.
#include "kernels/cpu/optimizer_passes.h"
#include "kernels/half.h"

#include <cmath>
#include <cstdint>

#if defined(__clang__)
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif

#include "kernels/cpu/optimizer_loops.h"

namespace pd2::kernels {
namespace {

template <typename T>
struct Lanes {
  using Scalar = T;
  static constexpr std::int64_t kWidth = 16 / static_cast<std::int64_t>(sizeof(T));
  T lane[kWidth];

  template <typename Function>
  static Lanes make(Function function) {
    Lanes result;
    for (std::int64_t i = 0; i < kWidth; ++i) result.lane[i] = function(i);
    return result;
  }

  static Lanes load(const T* p) {
    return make([&](std::int64_t i) { return p[i]; });
  }
  static Lanes broadcast(T x) {
    return make([&](std::int64_t) { return x; });
  }
  void store(T* p) const {
    for (std::int64_t i = 0; i < kWidth; ++i) p[i] = lane[i];
  }
  void stream(T* p) const { store(p); }
  static void finish_streaming() {}

  static Lanes load_bfloat16(const std::uint16_t* p) {
    return make([&](std::int64_t i) { return float_of_bfloat16(p[i]); });
  }
  template <HalfFormat kFormat, bool kStream>
  void store_half(std::uint16_t* p) const {
    for (std::int64_t i = 0; i < kWidth; ++i) {
      p[i] = kFormat == HalfFormat::kBfloat16 ? bfloat16_bits(lane[i]) : float16_bits(lane[i]);
    }
  }
  static Lanes join(const std::uint16_t* high, const std::int16_t* remainder) {
    return make([&](std::int64_t i) { return kernels::join({high[i], remainder[i]}); });
  }
  template <bool kStream>
  void split(std::uint16_t* high, std::int16_t* remainder) const {
    for (std::int64_t i = 0; i < kWidth; ++i) {
      const SplitFloat parts = kernels::split(lane[i]);
      high[i] = parts.high;
      remainder[i] = parts.remainder;
    }
  }

  friend Lanes add(Lanes a, Lanes b) {
    return make([&](std::int64_t i) { return a.lane[i] + b.lane[i]; });
  }
  friend Lanes subtract(Lanes a, Lanes b) {
    return make([&](std::int64_t i) { return a.lane[i] - b.lane[i]; });
  }
  friend Lanes multiply(Lanes a, Lanes b) {
    return make([&](std::int64_t i) { return a.lane[i] * b.lane[i]; });
  }
  friend Lanes divide(Lanes a, Lanes b) {
    return make([&](std::int64_t i) { return a.lane[i] / b.lane[i]; });
  }
  friend Lanes fma(Lanes a, Lanes b, Lanes c) {
    return make([&](std::int64_t i) { return std::fma(a.lane[i], b.lane[i], c.lane[i]); });
  }
  friend Lanes sqrt(Lanes a) {
    return make([&](std::int64_t i) { return std::sqrt(a.lane[i]); });
  }
  friend Lanes negate(Lanes a) {
    return make([&](std::int64_t i) { return -a.lane[i]; });
  }
  friend Lanes max(Lanes a, Lanes b) {
    return make([&](std::int64_t i) {
      return a.lane[i] > b.lane[i] || std::isnan(a.lane[i]) ? a.lane[i] : b.lane[i];
    });
  }
};

}  // namespace

template <typename Weights>
Passes<Weights> portable_passes() {
  return passes<Lanes<typename Weights::Scalar>, Weights>();
}
template Passes<PlainWeights<float>> portable_passes();
template Passes<PlainWeights<double>> portable_passes();
template Passes<MasterWeights<HalfFormat::kBfloat16>> portable_passes();
template Passes<MasterWeights<HalfFormat::kFloat16>> portable_passes();
template Passes<SplitWeights> portable_passes();
template Passes<Bfloat16Gradients<MasterWeights<HalfFormat::kBfloat16>>> portable_passes();
template Passes<Bfloat16Gradients<SplitWeights>> portable_passes();

}  // namespace pd2::kernels
