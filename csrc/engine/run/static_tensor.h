// Tensors at addresses that stay, and copies to them and from them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace pd2 {

// Whether the functions below can copy it.
bool is_plain(const at::Tensor& tensor);

// A tensor of the same sizes, strides and dtype over new memory, without a history; undefined for
// an undefined one. Kernels may depend on strides: they are kept, also of expanded tensors.
at::Tensor empty_alike(const at::Tensor& tensor);
// The same with its elements. It requires grad if `tensor` does.
at::Tensor copy_alike(const at::Tensor& tensor);
// Gives `to`, made by empty_alike(from) or from one like it, the elements of `from`.
void copy_elements(const at::Tensor& from, const at::Tensor& to);

// Appends what the tensors are, but for their elements and addresses; or a number.
void describe(std::string& text, std::span<const at::Tensor> tensors);
void describe(std::string& text, std::int64_t number);

}  // namespace pd2
