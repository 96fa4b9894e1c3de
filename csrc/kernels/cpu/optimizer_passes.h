// The tables of passes, one for each instruction set, each from a translation unit of its own.
#pragma once

#include "kernels/optimizer.h"

#include <cstdint>

namespace pd2::kernels {

// Fed is a Feedback or NoFeedback.
template <typename Weights, typename Fed>
struct FedPasses {
  using T = typename Weights::Scalar;
  using G = typename Weights::Gradient;
  // `stream`: w_out is 64-byte aligned, no other argument, and too large to be worth caching.
  void (*sgd)(const Weights& weights, const G* g, T* momentum_buffer, std::int64_t n,
              const SgdOptions& options, const Fed& feedback, bool stream);
  void (*adam)(const Weights& weights, const G* g, T* exp_avg, T* exp_avg_sq, T* max_exp_avg_sq,
               std::int64_t n, const AdamOptions& options, const Fed& feedback, bool stream);
};

template <typename Weights>
struct Passes {
  FedPasses<Weights, NoFeedback> plain;
  FedPasses<Weights, Feedback<typename Weights::Scalar>> fed;
  FedPasses<Weights, Feedback<std::uint16_t>> fed_bfloat16;  // of floats alone
};

template <typename Weights>
Passes<Weights> portable_passes();
#if defined(__x86_64__)
template <typename Weights>
Passes<Weights> avx2_passes();
template <typename Weights>
Passes<Weights> avx512_passes();
#endif

}  // namespace pd2::kernels
