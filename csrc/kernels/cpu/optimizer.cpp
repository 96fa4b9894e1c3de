#include "kernels/optimizer.h"

#include "kernels/cpu/instruction_set.h"
#include "kernels/cpu/optimizer_passes.h"

#include <cstdint>

namespace pd2::kernels {
namespace {

template <typename T>
Passes<T> current_passes() {
#if defined(__x86_64__)
  switch (instruction_set()) {
    case InstructionSet::kAvx512:
      return avx512_passes<T>();
    case InstructionSet::kAvx2:
      return avx2_passes<T>();
    case InstructionSet::kPortable:
      break;
  }
#endif
  return portable_passes<T>();
}

// Streaming stores spare the read of the line to be overwritten. They also drop it from the caches,
// which costs the next forward pass if all of the step's arrays would have fit there.
template <typename T>
bool worth_streaming(const T* w, const T* g, const T* w_out, std::int64_t n) {
  constexpr std::int64_t kMinBytes = 256 * 1024;
  const bool aligned = reinterpret_cast<std::uintptr_t>(w_out) % 64 == 0;
  return aligned && w_out != w && w_out != g &&
         n * static_cast<std::int64_t>(sizeof(T)) >= kMinBytes;
}

}  // namespace

template <typename T>
void sgd_cpu(const T* w, const T* g, T* momentum_buffer, T* w_out, std::int64_t n,
             const SgdOptions& options) {
  current_passes<T>().sgd(w, g, momentum_buffer, w_out, n, round_coefficients<T>(options),
                          worth_streaming(w, g, w_out, n));
}

template <typename T>
void adam_cpu(const T* w, const T* g, T* exp_avg, T* exp_avg_sq, T* max_exp_avg_sq, T* w_out,
              std::int64_t n, const AdamOptions& options) {
  current_passes<T>().adam(w, g, exp_avg, exp_avg_sq, max_exp_avg_sq, w_out, n,
                           round_coefficients<T>(options), worth_streaming(w, g, w_out, n));
}

template void sgd_cpu(const float*, const float*, float*, float*, std::int64_t, const SgdOptions&);
template void sgd_cpu(const double*, const double*, double*, double*, std::int64_t,
                      const SgdOptions&);
template void adam_cpu(const float*, const float*, float*, float*, float*, float*, std::int64_t,
                       const AdamOptions&);
template void adam_cpu(const double*, const double*, double*, double*, double*, double*,
                       std::int64_t, const AdamOptions&);

}  // namespace pd2::kernels
