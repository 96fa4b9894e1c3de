// A step by the passes of the instruction set that is chosen (see instruction_set.h).
#pragma once

#include "kernels/cpu/optimizer_passes.h"

#include <cstdint>

namespace pd2::kernels {

template <typename Weights>
bool in_place(const Weights& weights, const typename Weights::Gradient* g) {
  const void* out = weights.w_out;
  if constexpr (requires { weights.w; }) {
    return out == weights.w || out == g;
  }
  return out == g;
}

// Streaming stores spare the read of the line to be overwritten. They also drop it from the caches,
// which costs the next forward pass if all of the step's arrays would have fit there.
template <typename Weights>
bool worth_streaming(const Weights& weights, const typename Weights::Gradient* g, std::int64_t n) {
  constexpr std::int64_t kMinBytes = 256 * 1024;
  const bool aligned = reinterpret_cast<std::uintptr_t>(weights.w_out) % 64 == 0;
  return aligned && !in_place(weights, g) &&
         n * static_cast<std::int64_t>(sizeof(typename Weights::Scalar)) >= kMinBytes;
}

// `feedback` is a Feedback or NoFeedback.
template <typename Weights, typename Options, typename Fed = NoFeedback>
void step_cpu(const Weights& weights, const typename Weights::Gradient* g,
              const State<typename Weights::Scalar>& state, std::int64_t n, const Options& options,
              const Fed& feedback = {}) {
  const Pass<Weights, Options, Fed>& pass = current_passes();
  pass.run(weights, g, state, n, options, feedback, worth_streaming(weights, g, n));
}

}  // namespace pd2::kernels
