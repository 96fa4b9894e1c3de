#include "kernels/cpu/instruction_set.h"

#include "kernels/cpu/optimizer_passes.h"

#include <atomic>
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

}  // namespace pd2::kernels
