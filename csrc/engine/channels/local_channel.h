// Messages between two stage threads of one process: handed over without a copy.
#pragma once

#include "engine/channels/channel.h"

#include <c10/core/Device.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <utility>

namespace pd2 {

// Both ends of one direction of an edge. Tensors change device on the way if the stages differ.
class LocalChannel : public Sender, public Receiver {
 public:
  explicit LocalChannel(c10::Device destination) : destination_(destination) {}

  void send(LayoutId, Message message) override {
    for (at::Tensor& tensor : message.tensors) {
      if (tensor.defined() && tensor.device() != destination_) {
        tensor = tensor.to(destination_);
      }
    }
    {
      const std::lock_guard lock(mutex_);
      messages_.push_back(std::move(message));
    }
    arrived_.notify_one();
  }
  void expect(LayoutId) override {}
  Message receive() override {
    std::unique_lock lock(mutex_);
    arrived_.wait(lock, [&] { return aborted_ || !messages_.empty(); });
    if (aborted_) {
      throw ChannelAborted();
    }
    Message message = std::move(messages_.front());
    messages_.pop_front();
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
  const c10::Device destination_;
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<Message> messages_;
  bool aborted_ = false;
};

}  // namespace pd2
