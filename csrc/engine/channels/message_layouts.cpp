#include "engine/channels/message_layouts.h"

#include "core/check.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <string>
#include <vector>

namespace pd2 {
namespace {

// The message's form: its tensors without memory, on the meta device. Those that are dense keep
// their strides: they travel in storage order.
Message form_of(const Message& message) {
  Message header = message;
  for (at::Tensor& tensor : header.tensors) {
    if (tensor.defined()) {
      const auto options = tensor.options().device(at::kMeta);
      tensor = tensor.is_non_overlapping_and_dense()
                   ? at::empty_strided(tensor.sizes(), tensor.strides(), options)
                   : at::empty(tensor.sizes(), options);
    }
  }
  return header;
}

std::string shape_of(const at::Tensor& tensor) {
  return tensor.defined() ? c10::str(tensor.sizes()) : "none (no gradient)";
}

}  // namespace

at::Tensor pack(const Message& header) {
  std::vector<std::int64_t> words{static_cast<std::int64_t>(header.structure.size())};
  words.insert(words.end(), header.structure.begin(), header.structure.end());
  words.push_back(static_cast<std::int64_t>(header.tensors.size()));
  for (std::size_t i = 0; i < header.tensors.size(); ++i) {
    const at::Tensor& tensor = header.tensors[i];
    words.push_back(tensor.defined());
    if (tensor.defined()) {
      words.push_back(header.requires_grad[i]);
      words.push_back(static_cast<std::int64_t>(tensor.scalar_type()));
      words.push_back(tensor.dim());
      words.insert(words.end(), tensor.sizes().begin(), tensor.sizes().end());
      words.insert(words.end(), tensor.strides().begin(), tensor.strides().end());
    }
  }
  return at::tensor(words, at::kLong);
}

Message unpack(const at::Tensor& packed) {
  const std::int64_t* word = packed.const_data_ptr<std::int64_t>();
  const auto list = [&word](std::int64_t count) {
    const at::IntArrayRef values(word, count);
    word += count;
    return values;
  };
  Message header;
  const at::IntArrayRef structure = list(*word++);
  header.structure.assign(structure.begin(), structure.end());
  header.tensors.resize(*word++);
  header.requires_grad.resize(header.tensors.size());
  for (std::size_t i = 0; i < header.tensors.size(); ++i) {
    if (*word++ != 0) {
      header.requires_grad[i] = *word++ != 0;
      const auto dtype = static_cast<at::ScalarType>(*word++);
      const std::int64_t dim = *word++;
      const at::IntArrayRef sizes = list(dim), strides = list(dim);
      header.tensors[i] =
          at::empty_strided(sizes, strides, at::TensorOptions(dtype).device(at::kMeta));
    }
  }
  return header;
}

const Message* SentLayouts::lay_out(LayoutId layout, Message& message) {
  auto known = headers_.find(layout);
  const bool is_new = known == headers_.end();
  if (is_new) {
    if (message.is_void) {
      return nullptr;
    }
    known = headers_.emplace(layout, form_of(message)).first;
  }
  const Message& header = known->second;
  if (message.is_void) {  // zeros will do
    message = header;
    std::ranges::fill(message.tensors, at::Tensor());
  }
  PD2_CHECK(
      header.structure == message.structure && header.tensors.size() == message.tensors.size(),
      "values between stages must follow from the shapes of the model's inputs: a message of ",
      message.tensors.size(), " tensors, where one of ", header.tensors.size(),
      " tensors with other constants was sent for the same input shapes");
  for (std::size_t i = 0; i < message.tensors.size(); ++i) {
    message.tensors[i] = laid_out(message, i, header);
  }
  return is_new ? &header : nullptr;
}

at::Tensor SentLayouts::laid_out(const Message& message, std::size_t i,
                                 const Message& header) const {
  const at::Tensor& form = header.tensors[i];
  at::Tensor tensor = message.tensors[i];
  if (!tensor.defined() && form.defined()) {
    tensor = at::zeros(form.sizes(), form.options().device(device_));
  }
  PD2_CHECK(tensor.defined() == form.defined() &&
                (!form.defined() ||
                 (tensor.scalar_type() == form.scalar_type() && tensor.sizes() == form.sizes())),
            "values between stages must follow from the shapes of the model's inputs: tensor ", i,
            " has shape ", shape_of(tensor), ", for the same input shapes it had ", shape_of(form));
  if (!form.defined()) {
    return tensor;
  }
  PD2_CHECK(header.requires_grad[i] == message.requires_grad[i],
            "values between stages must follow from the shapes of the model's inputs: tensor ", i,
            message.requires_grad[i] ? " requires" : " does not require",
            " a gradient, for the same input shapes it did", header.requires_grad[i] ? "" : " not");
  tensor = tensor.resolve_conj().resolve_neg();  // bits that only this process would know of
  if (tensor.strides() != form.strides()) {
    tensor = at::empty_strided(form.sizes(), form.strides(), tensor.options()).copy_(tensor);
  }
  return tensor;
}

}  // namespace pd2
