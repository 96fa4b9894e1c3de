// The norms of many tensors at once.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace pd2 {

// As torch.linalg.vector_norm, for each tensor; all on one device, for which the host waits once.
// On the CPU they are its numbers bit for bit. On a device float32 numbers are added up in double,
// in an order of their own, and then rounded.
std::vector<double> norms_of(const std::vector<at::Tensor>& tensors, double norm_type);

}  // namespace pd2
