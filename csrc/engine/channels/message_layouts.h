// What a message's layout says of it, and how the two ends of a channel come to know it.
#pragma once

#include "engine/channels/channel.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <map>

namespace pd2 {

// A header as int64 numbers. A header is a message without content: its tensors are on the meta
// device.
at::Tensor pack(const Message& header);
Message unpack(const at::Tensor& packed);

// The layouts that one sender has sent messages of. Not thread-safe.
class SentLayouts {
 public:
  // `device`: of the messages' tensors.
  explicit SentLayouts(c10::Device device) : device_(device) {}

  // The message's header; null of a void message of a layout that is not known.
  const Message* header_of(LayoutId layout, const Message& message);
  bool knows(LayoutId layout) const { return headers_.count(layout) > 0; }
  // The message as its header says that it is: strides included, with zeros in place of gradients
  // that there are none of, and of all that a void message has not. Throws ValueError if it is
  // another one.
  Message laid_out(Message message, const Message& header) const;

 private:
  at::Tensor laid_out(const Message& message, std::size_t i, const Message& header) const;

  const c10::Device device_;
  std::map<LayoutId, Message> headers_;
};

}  // namespace pd2
