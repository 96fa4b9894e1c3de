// The norms of many tensors at once.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/linalg_vector_norm.h>

#include <optional>
#include <vector>

namespace pd2 {

// As torch.linalg.vector_norm, of bfloat16 with dtype=torch.float32. On the tensor's device.
inline at::Tensor norm_by_torch(const at::Tensor& tensor, double norm_type) {
  if (tensor.scalar_type() != at::kBFloat16) {
    return at::linalg_vector_norm(tensor, norm_type);
  }
  return at::linalg_vector_norm(tensor, norm_type, std::nullopt, /*keepdim=*/false, at::kFloat);
}

// The same for each tensor, as float64; all on one device, where the result is. On the CPU they are
// its numbers bit for bit. On a device narrower numbers are added up in double, in an order of
// their own, and then rounded.
at::Tensor norms_of(const std::vector<at::Tensor>& tensors, double norm_type);

}  // namespace pd2
