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

  void send(LayoutId layout, Message message) override;
  void expect(LayoutId) override {}
  Message receive() override;
  void abort() override;

 private:
  const c10::Device destination_;
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<Message> messages_;
  bool aborted_ = false;
};

}  // namespace pd2
