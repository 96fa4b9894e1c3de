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

  // Makes the message what its layout's header says, which is the form of the first: strides
  // included, with zeros in place of gradients that there are none of, and of all that a void
  // message has not. One of a layout that is not known stays void. Gives the header if it is new.
  // Throws ValueError for another message.
  const Message* lay_out(LayoutId layout, Message& message);

 private:
  at::Tensor laid_out(const Message& message, std::size_t i, const Message& header) const;

  const c10::Device device_;
  std::map<LayoutId, Message> headers_;
};

}  // namespace pd2
