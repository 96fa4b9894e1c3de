// For kernels that work on pointers, outside torch's operators.

#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace pd2 {

struct KernelUse {
  const void* begin;
  std::size_t bytes;
  bool is_write;
};

// Launches on the current stream of the memory's device: checks what the kernel reads and writes,
// and waits until what comes before is over. The caller then runs the kernel at once. Throws
// RaceError; std::invalid_argument if the memory is on no device or on several.
void access(std::span<const KernelUse> uses, const std::string& name);

}  // namespace pd2
