// Messages, and how they travel along one direction of an edge between two stages.
#pragma once

#include "engine/streams.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <string>
#include <utility>
#include <vector>

namespace pd2 {

// All values that cross one edge (producer stage -> consumer stage) for one microbatch, or the
// gradients that come back. Tensors carry no autograd history.
struct Message {
  // Opaque to the engine: how the front end rebuilds its values from the tensors. Empty: each value
  // is one tensor.
  std::string structure;
  std::vector<at::Tensor> tensors;  // in a gradient message, undefined if there is no gradient
  std::vector<bool> requires_grad;  // by tensor
  // It stands for a message of a discarded batch and has no content. What it would have been is not
  // known to the receiver, or is in the process.
  bool is_void = false;
  // The tensors are there after it. A receiver's stream has to wait for it.
  Fence ready{};

  bool differentiable() const {
    return std::ranges::find(requires_grad, true) != requires_grad.end();
  }

  std::int64_t bytes() const {
    std::int64_t sum = 0;
    for (const at::Tensor& tensor : tensors) {
      sum += tensor.defined() ? static_cast<std::int64_t>(tensor.nbytes()) : 0;
    }
    return sum;
  }
};

// The memory of a dense tensor as a vector, in storage order.
inline at::Tensor storage_order(const at::Tensor& dense) {
  return dense.as_strided({dense.numel()}, {1});
}

// A layout names the shapes, dtypes, strides and structure of a message: two microbatches of one
// layout send messages that differ in their tensors' contents alone. Both ends number layouts
// alike.
using LayoutId = std::int64_t;

// What both ends have. Any thread may call it.
class ChannelEnd {
 public:
  virtual ~ChannelEnd() = default;
  // Ends all waiting of hosts, now and later, with ChannelAborted.
  virtual void abort() = 0;
  // After abort(), between processes' devices: ends waiting of devices, too, which go on without
  // what they have waited for. The other end is told before, so that it counts on nothing that
  // comes after. False: there are no such devices.
  virtual bool tell_cut_off() { return false; }
  virtual void cut_off() {}
  // Whether one of the two ends has told.
  virtual bool is_cut_off() const { return false; }
  // Bytes of buffers for messages under way.
  virtual std::int64_t buffer_bytes() const { return 0; }
};

// The sending end. One thread sends.
class Sender : public virtual ChannelEnd {
 public:
  // Does all for the message that send() gets next that takes memory, or that the receiver may have
  // to wait for before it can send something itself: the header of a new layout. send() does it
  // otherwise. Of a message that is void only `requires_grad` counts: whether its gradients will
  // come. Between processes that is what the messages of the layout so far have been, or nothing if
  // there was none: the receiver gets one of meaningless content then, or one that is void.
  // Throws ValueError, before anything is sent, for a message that is not of its layout.
  void prepare(LayoutId layout, Message& message) {
    if (!is_prepared_) {
      lay_out(layout, message);
      is_prepared_ = true;
    }
  }
  void send(LayoutId layout, Message message) {
    prepare(layout, message);
    is_prepared_ = false;
    transfer(layout, std::move(message));
  }

 private:
  virtual void lay_out(LayoutId, Message&) {}
  // Begins the transfer of a message that has been laid out.
  virtual void transfer(LayoutId layout, Message message) = 0;

  bool is_prepared_ = false;
};

// The receiving end. One thread receives; any may call expect().
class Receiver : public virtual ChannelEnd {
 public:
  // Announces the next message, in order; its transfer may begin at once.
  virtual void expect(LayoutId layout) = 0;
  // These two are for channels that begin no transfer by themselves before receive(); others do
  // nothing. The thread that receives calls them.
  // Begins the transfer of the oldest expected message that has not begun. May wait for its header.
  virtual void post() {}
  // Both for the oldest expected message, if it has not begun.
  virtual void prepare() {}
  // The oldest expected message, waiting for it if need be.
  virtual Message receive() = 0;
};

// No failure: something else ended the pipeline.
class ChannelAborted : public std::exception {
 public:
  const char* what() const noexcept override { return "the pipeline was closed"; }
};

}  // namespace pd2
