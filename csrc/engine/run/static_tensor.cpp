#include "engine/run/static_tensor.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>

namespace pd2 {
namespace {

// From its first element to its last one in memory.
std::int64_t span_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) {
    return 0;
  }
  std::int64_t elements = 1;
  for (std::int64_t i = 0; i < tensor.dim(); ++i) {
    elements += (tensor.size(i) - 1) * tensor.stride(i);
  }
  return elements;
}

// Writing to it does not count as a write to the tensor, which autograd may have saved.
at::Tensor flat(const at::Tensor& tensor) {
  return tensor.variable_data().as_strided({span_of(tensor)}, {1}, tensor.storage_offset());
}

}  // namespace

bool is_plain(const at::Tensor& tensor) {
  return !tensor.defined() || (tensor.layout() == at::kStrided && !tensor.is_conj() &&
                               !tensor.is_neg() && !tensor.is_quantized() && tensor.has_storage());
}

at::Tensor empty_alike(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return {};
  }
  const at::NoGradGuard no_grad;
  const auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(tensor.device());
  return at::empty({span_of(tensor)}, options)
      .as_strided(tensor.sizes(), tensor.strides(), /*storage_offset=*/0)
      .tensor_data();
}

at::Tensor copy_alike(const at::Tensor& tensor) {
  at::Tensor made = empty_alike(tensor);
  if (made.defined()) {
    copy_elements(tensor, made);
    made.set_requires_grad(tensor.requires_grad());
  }
  return made;
}

void copy_elements(const at::Tensor& from, const at::Tensor& to) {
  if (from.defined() && from.numel() > 0) {
    const at::NoGradGuard no_grad;
    flat(to).copy_(flat(from));
  }
}

void describe(std::string& text, std::int64_t number) {
  text.append(reinterpret_cast<const char*>(&number), sizeof(number));
}

void describe(std::string& text, std::span<const at::Tensor> tensors) {
  describe(text, static_cast<std::int64_t>(tensors.size()));
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined()) {
      describe(text, -1);
      continue;
    }
    describe(text, static_cast<std::int64_t>(tensor.scalar_type()));
    describe(text, tensor.requires_grad());
    describe(text, tensor.dim());
    for (std::int64_t i = 0; i < tensor.dim(); ++i) {
      describe(text, tensor.size(i));
      describe(text, tensor.stride(i));
    }
  }
}

}  // namespace pd2
