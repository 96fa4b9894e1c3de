// Messages of a device that travel by way of the host's memory.
#pragma once

#include "engine/channels/channel.h"
#include "engine/channels/message_layouts.h"
#include "engine/fault.h"
#include "engine/streams.h"

#include <c10/core/Device.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace pd2 {

// Sends over a sender of the host's tensors: where the device's process group knows nothing better,
// or cannot, as two processes share the device. Copies have a stream of their own; a thread hands
// each message over when its copy is complete. What the other sender throws there raises the fault,
// and the next send() throws it.
class StagedSender : public Sender {
 public:
  // `device`: of the messages.
  StagedSender(std::shared_ptr<Sender> hosts, c10::Device device, std::shared_ptr<Fault> fault);
  StagedSender(const StagedSender&) = delete;
  StagedSender& operator=(const StagedSender&) = delete;
  ~StagedSender() override;
  void abort() override;
  std::int64_t buffer_bytes() const override;

 private:
  struct Staged {
    LayoutId layout;
    Message message{};                  // of the host
    std::vector<at::Tensor> sources{};  // of which it is the copy
    Fence copied{};
  };
  void lay_out(LayoutId layout, Message& message) override;
  void transfer(LayoutId layout, Message message) override;
  void hand_over();
  void fail(const std::exception_ptr& error);

  const std::shared_ptr<Sender> hosts_;
  const c10::Device device_;
  const std::shared_ptr<Fault> fault_;
  const MaybeStream copies_ = own_stream(device_, Urgency::kMessage);
  SentLayouts layouts_{device_};
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Staged> staged_;  // the first one stays until it has been handed over
  std::exception_ptr error_;   // after which nothing is sent
  std::thread thread_;
};

// Receives by a receiver of the host's tensors, best in memory that is pinned.
class StagedReceiver : public Receiver {
 public:
  StagedReceiver(std::shared_ptr<Receiver> hosts, c10::Device device)
      : hosts_(std::move(hosts)), device_(device) {}
  void expect(LayoutId layout) override { hosts_->expect(layout); }
  void post() override { hosts_->post(); }
  void prepare() override { hosts_->prepare(); }
  Message receive() override;
  void abort() override { hosts_->abort(); }
  std::int64_t buffer_bytes() const override;

 private:
  struct Source {
    Fence copied;
    std::vector<at::Tensor> tensors;
    std::int64_t bytes = 0;
  };

  const std::shared_ptr<Receiver> hosts_;
  const c10::Device device_;
  const MaybeStream copies_ = own_stream(device_, Urgency::kMessage);
  mutable std::mutex mutex_;
  std::deque<Source> sources_;  // that may be being copied
};

}  // namespace pd2
