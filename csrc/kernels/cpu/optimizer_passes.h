// The tables of passes, one for each instruction set, each from a translation unit of its own.
#pragma once

#include "kernels/optimizer.h"

#include <cstdint>

namespace pd2::kernels {

// Fed is a Feedback or NoFeedback.
template <typename Weights, typename Options, typename Fed>
struct Pass {
  // `stream`: w_out is 64-byte aligned, no other argument, and too large to be worth caching.
  void (*run)(const Weights& weights, const typename Weights::Gradient* g,
              const State<typename Weights::Scalar>& state, std::int64_t n, const Options& options,
              const Fed& feedback, bool stream);
};

template <typename Weights, typename Fed>
struct FedPasses : Pass<Weights, SgdOptions, Fed>, Pass<Weights, AdamOptions, Fed> {};

template <typename Weights>
struct Passes : FedPasses<Weights, NoFeedback>,
                FedPasses<Weights, Feedback<typename Weights::Scalar>> {};

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
const AllPasses& current_passes();  // of instruction_set()

}  // namespace pd2::kernels
