// Which vector instructions the CPU passes use: the best that the machine has, unless a test says
// otherwise.
#pragma once

namespace pd2::kernels {

enum class InstructionSet { kPortable, kAvx2, kAvx512 };

bool is_supported(InstructionSet instruction_set);

// The one that the next call will use.
InstructionSet instruction_set();

// For tests and benchmarks; affects all threads. Throws std::invalid_argument if the machine lacks
// `instruction_set`.
void set_instruction_set(InstructionSet instruction_set);

}  // namespace pd2::kernels
