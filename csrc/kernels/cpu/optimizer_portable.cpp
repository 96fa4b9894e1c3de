// For machines without a path of their own. A vector is an array of 16 bytes: compilers turn the
// loops over it into the machine's vectors where it has them (NEON), else into scalar code.
#include "kernels/cpu/optimizer_passes.h"

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

template <>
Passes<float> portable_passes<float>() {
  return passes<Lanes<float>>();
}

template <>
Passes<double> portable_passes<double>() {
  return passes<Lanes<double>>();
}

}  // namespace pd2::kernels
