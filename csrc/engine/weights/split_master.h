// Float32 weights in two buffers of 16 bits, as whole tensors: see kernels/half.h.
#pragma once

#include <ATen/core/Tensor.h>

namespace pd2 {

// `high` is bfloat16, `remainder` int16, both contiguous and of one shape; the result is float32.
at::Tensor join_master(const at::Tensor& high, const at::Tensor& remainder);
// Writes the two parts of `master`.
void split_master(const at::Tensor& master, const at::Tensor& high, const at::Tensor& remainder);

}  // namespace pd2
