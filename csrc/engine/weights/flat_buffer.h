// One allocation for all parameters of one stage and dtype; each parameter is a view of it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace pd2 {

// at::zeros({numel}, options), on 2 MiB pages where the system grants them on request (Linux with
// transparent huge pages): an optimizer step walks through five such buffers at once, and with 4
// KiB pages its address translations alone cost about a tenth of its time.
at::Tensor zeros_on_huge_pages(std::int64_t numel, const at::TensorOptions& options);

// On what parameters begin in a flat buffer. BLAS and vectorised kernels pick their paths by
// alignment, and the pipeline must give the bits that the unsplit model gives: on the CPU they look
// at no more than a cache line; devices' allocators give each tensor 512 bytes.
inline std::int64_t alignment_bytes(c10::Device device) { return device.is_cpu() ? 64 : 512; }

// Bytes that belong to parameters, and those between them.
struct PaddedBytes {
  std::int64_t used = 0, padding = 0;
};

// Where one parameter lies in a flat buffer, in elements, with the sizes and strides of its view.
struct ParameterView {
  std::int64_t offset = 0;
  std::int64_t numel = 0;
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;
};

// The placement of a list of parameters in a flat buffer. Every parameter begins on a boundary
// of alignment_bytes(), as a tensor of its own would. Padding is zero and stays zero under every
// optimizer.
class FlatPacking {
 public:
  // All parameters have one dtype and device. A dense parameter keeps its strides (channels_last).
  explicit FlatPacking(const std::vector<at::Tensor>& parameters);

  // A zeroed buffer for this packing; `dtype` may differ from the parameters' (float32 gradients of
  // bfloat16 parameters). `extra` elements are appended, for use outside the parameters.
  at::Tensor allocate(at::ScalarType dtype, std::int64_t extra = 0) const;
  at::Tensor view(const at::Tensor& flat, std::size_t parameter) const;

  const std::vector<ParameterView>& views() const { return views_; }
  std::int64_t numel() const { return numel_; }                      // with padding
  std::int64_t parameter_numel() const { return parameter_numel_; }  // without
  at::ScalarType dtype() const { return options_.dtype().toScalarType(); }

 private:
  std::vector<ParameterView> views_;
  std::int64_t numel_ = 0;
  std::int64_t parameter_numel_ = 0;
  at::TensorOptions options_;
};

}  // namespace pd2
