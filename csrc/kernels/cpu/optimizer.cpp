#include "kernels/optimizer.h"

#include "kernels/cpu/instruction_set.h"
#include "kernels/cpu/optimizer_passes.h"

#include <atomic>
#include <cstdint>
#include <stdexcept>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace pd2::kernels {
namespace {

#if defined(__x86_64__)
// Not every compiler's __builtin_cpu_supports knows it.
bool has_f16c() {
  unsigned int eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
#endif

InstructionSet best_supported() {
  for (InstructionSet candidate : {InstructionSet::kAvx512, InstructionSet::kAvx2}) {
    if (is_supported(candidate)) return candidate;
  }
  return InstructionSet::kPortable;
}

std::atomic<InstructionSet>& chosen() {
  static std::atomic<InstructionSet> value{best_supported()};
  return value;
}

const AllPasses& current_passes() {
#if defined(__x86_64__)
  switch (instruction_set()) {
    case InstructionSet::kAvx512:
      return avx512_passes();
    case InstructionSet::kAvx2:
      return avx2_passes();
    case InstructionSet::kPortable:
      break;
  }
#endif
  return portable_passes();
}

// The weights that a step reads and does not write.
template <typename T>
const T* read_weights(const PlainWeights<T>& weights) {
  return weights.w;
}
template <HalfFormat kFormat>
const std::uint16_t* read_weights(const MasterWeights<kFormat>&) {
  return nullptr;
}
const std::uint16_t* read_weights(const SplitWeights& weights) { return weights.w; }

template <typename Weights>
bool in_place(const Weights& weights, const typename Weights::Gradient* g) {
  const void* out = weights.w_out;
  return out == read_weights(weights) || out == g;
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

}  // namespace

bool is_supported(InstructionSet instruction_set) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  if (instruction_set == InstructionSet::kAvx2) return avx2;
  if (instruction_set == InstructionSet::kAvx512) {
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq");
  }
#endif
  return instruction_set == InstructionSet::kPortable;
}

InstructionSet instruction_set() { return chosen().load(std::memory_order_relaxed); }

void set_instruction_set(InstructionSet instruction_set) {
  if (!is_supported(instruction_set)) {
    throw std::invalid_argument("this machine does not support the instruction set");
  }
  chosen().store(instruction_set, std::memory_order_relaxed);
}

template <typename Weights, typename T, typename Fed>
void sgd_cpu(const Weights& weights, const typename Weights::Gradient* g, T* momentum_buffer,
             std::int64_t n, const SgdOptions& options, const Fed& feedback) {
  const FedPasses<Weights, Fed>& passes = current_passes();
  passes.sgd(weights, g, momentum_buffer, n, options, feedback, worth_streaming(weights, g, n));
}

template <typename Weights, typename T, typename Fed>
void adam_cpu(const Weights& weights, const typename Weights::Gradient* g, T* exp_avg,
              T* exp_avg_sq, T* max_exp_avg_sq, std::int64_t n, const AdamOptions& options,
              const Fed& feedback) {
  const FedPasses<Weights, Fed>& passes = current_passes();
  passes.adam(weights, g, exp_avg, exp_avg_sq, max_exp_avg_sq, n, options, feedback,
              worth_streaming(weights, g, n));
}

#define PD2_INSTANTIATE_FED(Weights, G, T, Fed)                                                  \
  template void sgd_cpu(const Weights&, const G*, T*, std::int64_t, const SgdOptions&,           \
                        const Fed&);                                                             \
  template void adam_cpu(const Weights&, const G*, T*, T*, T*, std::int64_t, const AdamOptions&, \
                         const Fed&);
#define PD2_INSTANTIATE(Weights, G, T)            \
  PD2_INSTANTIATE_FED(Weights, G, T, NoFeedback)  \
  PD2_INSTANTIATE_FED(Weights, G, T, Feedback<T>) \
  PD2_INSTANTIATE_FED(Weights, G, T, Feedback<std::uint16_t>)
PD2_INSTANTIATE(PlainWeights<float>, float, float)
PD2_INSTANTIATE_FED(PlainWeights<double>, double, double, NoFeedback)
PD2_INSTANTIATE_FED(PlainWeights<double>, double, double, Feedback<double>)
PD2_INSTANTIATE(MasterWeights<HalfFormat::kBfloat16>, float, float)
PD2_INSTANTIATE(MasterWeights<HalfFormat::kFloat16>, float, float)
PD2_INSTANTIATE(SplitWeights, float, float)
PD2_INSTANTIATE(Bfloat16Gradients<MasterWeights<HalfFormat::kBfloat16>>, std::uint16_t, float)
PD2_INSTANTIATE(Bfloat16Gradients<SplitWeights>, std::uint16_t, float)
#undef PD2_INSTANTIATE
#undef PD2_INSTANTIATE_FED

}  // namespace pd2::kernels
