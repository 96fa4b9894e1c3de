// Messages between two stage threads of one process: handed over without a copy.
#pragma once

#include "engine/channels/channel.h"
#include "engine/streams.h"

#include <c10/core/Device.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <utility>

namespace pd2 {

// Both ends of one direction of an edge. Tensors change device on the way if the stages differ: on
// streams of the channel's own, so that neither stage's work waits for the other's.
class LocalChannel : public Sender, public Receiver {
 public:
  LocalChannel(c10::Device source, c10::Device destination)
      : source_(source),
        destination_(destination),
        outbound_(source == destination ? std::nullopt : own_stream(source, Urgency::kMessage)),
        inbound_(source == destination ? std::nullopt
                                       : own_stream(destination, Urgency::kMessage)) {}

  void expect(LayoutId) override {}
  Message receive() override {
    std::unique_lock lock(mutex_);
    arrived_.wait(lock, [&] { return aborted_ || !messages_.empty(); });
    if (aborted_) {
      throw ChannelAborted();
    }
    Message message = std::move(messages_.front());
    messages_.pop_front();
    lock.unlock();
    const MaybeStream here = stream_here(destination_);
    message.ready.hold_back(here);
    for (const at::Tensor& tensor : message.tensors) {
      use_on(tensor, here);
    }
    return message;
  }
  void abort() override {
    {
      const std::lock_guard lock(mutex_);
      aborted_ = true;
    }
    arrived_.notify_all();
  }

 private:
  void transfer(LayoutId, Message message) override {
    message.ready = Fence::here(source_);
    if (source_ != destination_) {
      copy(message);
    }
    {
      const std::lock_guard lock(mutex_);
      messages_.push_back(std::move(message));
    }
    arrived_.notify_one();
  }
  void copy(Message& message) const {
    message.ready.hold_back(outbound_ ? outbound_ : inbound_);
    const OnStream from(outbound_);
    const OnStream to(inbound_);
    // A copy that the host takes part in has been made when the call returns.
    const bool is_of_devices = outbound_ && inbound_;
    for (at::Tensor& tensor : message.tensors) {
      if (tensor.defined() && tensor.device() != destination_) {
        use_on(tensor, outbound_);
        tensor = tensor.to(tensor.options().device(destination_), /*non_blocking=*/is_of_devices);
      }
    }
    message.ready = Fence::of(inbound_);
  }

  const c10::Device source_, destination_;
  const MaybeStream outbound_, inbound_;
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<Message> messages_;
  bool aborted_ = false;
};

}  // namespace pd2
