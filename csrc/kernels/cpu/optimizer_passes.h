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
struct Passes : FedPasses<Weights, NoFeedback>,
                FedPasses<Weights, Feedback<typename Weights::Scalar>>,
                FedPasses<Weights, Feedback<std::uint16_t>> {};  // the last are of floats alone

// Those of every kind of weights.
struct AllPasses : Passes<PlainWeights<float>>,
                   Passes<PlainWeights<double>>,
                   Passes<MasterWeights<HalfFormat::kBfloat16>>,
                   Passes<MasterWeights<HalfFormat::kFloat16>>,
                   Passes<SplitWeights>,
                   Passes<Bfloat16Gradients<MasterWeights<HalfFormat::kBfloat16>>>,
                   Passes<Bfloat16Gradients<SplitWeights>> {};

const AllPasses& portable_passes();
#if defined(__x86_64__)
const AllPasses& avx2_passes();
const AllPasses& avx512_passes();
#endif

}  // namespace pd2::kernels
