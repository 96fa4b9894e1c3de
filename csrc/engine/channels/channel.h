// How messages travel along one direction of an edge between two stages.
#pragma once

#include "engine/channels/message.h"

#include <cstdint>

namespace pd2 {

// A layout names the shapes, dtypes, strides and structure of a message: two microbatches of one
// layout send messages that differ in their tensors' contents alone. Both ends number layouts
// alike.
using LayoutId = std::int64_t;

// The sending end. One thread sends; abort() may be called from any.
class Sender {
 public:
  virtual ~Sender() = default;
  virtual void send(LayoutId layout, Message message) = 0;
  // Ends all waiting, now and later, with ChannelAborted.
  virtual void abort() = 0;
  // Bytes of buffers for messages under way.
  virtual std::int64_t buffer_bytes() const { return 0; }
};

// The receiving end. One thread receives; expect() and abort() may be called from any.
class Receiver {
 public:
  virtual ~Receiver() = default;
  // Announces the next message, in order; its transfer may begin at once.
  virtual void expect(LayoutId layout) = 0;
  // The oldest expected message, waiting for it if need be.
  virtual Message receive() = 0;
  virtual void abort() = 0;
  // Bytes of buffers for messages under way.
  virtual std::int64_t buffer_bytes() const { return 0; }
};

// No failure: something else ended the pipeline.
class ChannelAborted : public std::exception {
 public:
  const char* what() const noexcept override { return "the pipeline was closed"; }
};

}  // namespace pd2
