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

std::atomic<InstructionSet>& chosen() {
  static std::atomic<InstructionSet> value{
      is_supported(InstructionSet::kAvx2) ? InstructionSet::kAvx2 : InstructionSet::kPortable};
  return value;
}

}  // namespace

bool is_supported(InstructionSet instruction_set) {
#if defined(__x86_64__)
  if (instruction_set == InstructionSet::kAvx2) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
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
  if (instruction_set() == InstructionSet::kAvx2) return avx2_passes();
#endif
  return portable_passes();
}

}  // namespace pd2::kernels
