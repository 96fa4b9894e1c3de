// Messages over a device's group. The meta device stands for one: its tensors have no content.
#include "core/check.h"
#include "engine/channels/process_group_channel.h"
#include "engine/process_group.h"
#include "mailbox_group.h"

#include <ATen/ops/empty.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <algorithm>
#include <atomic>
#include <future>
#include <string>

namespace pd2 {
namespace {

using Calls = std::vector<std::string>;

class Transfer : public c10d::Work {
 public:
  explicit Transfer(std::shared_ptr<std::atomic<bool>> is_done) : is_done_(std::move(is_done)) {}
  bool isCompleted() override { return *is_done_; }
  bool wait(std::chrono::milliseconds) override { return true; }  // a stream's, not the host's
  void abort() override {}

 private:
  std::shared_ptr<std::atomic<bool>> is_done_;
};

class Coalescing : public c10d::Backend {
 public:
  using c10d::Backend::Backend;
  bool supportsCoalescing() const override { return true; }
  const std::string getBackendName() const override { return "recording"; }
};

// Notes what it is asked for.
class RecordingGroup : public c10d::ProcessGroup {
 public:
  RecordingGroup() : c10d::ProcessGroup(0, 2) {
    setBackend(at::kMeta, CUSTOM, c10::make_intrusive<Coalescing>(0, 2));
  }
  void startCoalescing(c10::DeviceType) override { calls.push_back("start"); }
  c10::intrusive_ptr<c10d::Work> endCoalescing(c10::DeviceType) override {
    calls.push_back("end");
    return c10::make_intrusive<Transfer>(is_done);
  }
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int, int) override {
    return note("send", tensors);
  }
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int, int) override {
    return note("recv", tensors);
  }
  void abort() override { calls.push_back("abort"); }

  Calls calls;
  std::shared_ptr<std::atomic<bool>> is_done = std::make_shared<std::atomic<bool>>(false);

 private:
  c10::intrusive_ptr<c10d::Work> note(const std::string& call, std::vector<at::Tensor>& tensors) {
    calls.push_back(c10::str(call, " ", tensors.at(0).scalar_type(), tensors.at(0).sizes()));
    return c10::make_intrusive<Transfer>(is_done);
  }
};

class DeviceGroupTest : public ::testing::Test {
 protected:
  static Message message_of(at::ScalarType dtype, std::int64_t count) {
    const auto options = at::TensorOptions(dtype).device(at::kMeta);
    Message message;
    message.tensors = {at::empty({count}, options), at::empty({0}, options),
                       at::empty({2, count}, options).t()};
    message.requires_grad = {false, false, false};
    return message;
  }
  // The hosts' group knows tensors of the host alone, and this one none of them.
  Peer peer(int rank, const c10::intrusive_ptr<RecordingGroup>& group) {
    Peer peer{group, 1 - rank, 1 - rank, at::kMeta};
    peer.headers = HeaderPath{c10::make_intrusive<MailboxGroup>(rank, mailbox), 1 - rank, 7};
    return peer;
  }

  std::shared_ptr<Mailbox> mailbox = std::make_shared<Mailbox>();
  c10::intrusive_ptr<RecordingGroup> sending = c10::make_intrusive<RecordingGroup>();
  c10::intrusive_ptr<RecordingGroup> receiving = c10::make_intrusive<RecordingGroup>();
  ProcessGroupSender sender{peer(0, sending), 4};
  ProcessGroupReceiver receiver{peer(1, receiving), 0};
};

TEST_F(DeviceGroupTest, AMessageIsOneCallOfBytesAndItsHeaderGoesOverTheHosts) {
  receiver.expect(0);
  sender.send(0, message_of(at::kComplexFloat, 3));
  const Message received = receiver.receive();
  EXPECT_EQ(sending->calls, (Calls{"start", "send Byte[24]", "send Byte[48]", "end"}));
  EXPECT_EQ(receiving->calls, (Calls{"start", "recv Byte[24]", "recv Byte[48]", "end"}));
  EXPECT_EQ(received.tensors.at(2).sizes(), (at::IntArrayRef{3, 2}));
  EXPECT_EQ(received.tensors.at(2).strides(), (at::IntArrayRef{1, 3}));
  EXPECT_EQ(received.tensors.at(2).scalar_type(), at::kComplexFloat);
  EXPECT_TRUE(received.tensors.at(2).is_meta());
}

TEST_F(DeviceGroupTest, NoReceiveBeginsBeforeItIsAskedForOrAwaited) {
  for (int i = 0; i < 4; ++i) {
    receiver.expect(0);
    sender.send(0, message_of(at::kShort, 1));
  }
  const auto num_begun = [this] { return std::ranges::count(receiving->calls, "start"); };
  EXPECT_EQ(num_begun(), 0);
  receiver.post();  // of a new layout: waits for its header
  EXPECT_EQ(num_begun(), 1);
  receiver.receive();
  EXPECT_EQ(num_begun(), 1);
  receiver.post();
  EXPECT_EQ(num_begun(), 2);
  receiver.receive();
  EXPECT_EQ(num_begun(), 2);
  receiver.receive();
  EXPECT_EQ(num_begun(), 3);
  receiver.receive();
  EXPECT_EQ(num_begun(), 4);
}

TEST_F(DeviceGroupTest, AHeaderIsSentBeforeItsMessageAndIsEnoughForAReceive) {
  receiver.expect(0);
  receiver.expect(1);
  receiver.expect(0);
  for (const LayoutId layout : {0, 1}) {
    Message first = message_of(at::kFloat, 3 + layout);
    sender.prepare(layout, first);
    EXPECT_TRUE(sending->calls.empty());
    receiver.post();
    sender.send(layout, first);
    sending->calls.clear();
  }
  EXPECT_EQ(receiving->calls, (Calls{"start", "recv Byte[12]", "recv Byte[24]", "end", "start",
                                     "recv Byte[16]", "recv Byte[32]", "end"}));
  receiver.post();  // of a known layout
  EXPECT_EQ(receiving->calls.at(9), "recv Byte[12]");
}

TEST_F(DeviceGroupTest, WhatIsPreparedHasTheFormOfItsLayout) {
  sender.send(0, message_of(at::kFloat, 3));
  Message second = message_of(at::kFloat, 3);
  second.tensors.at(2) = second.tensors.at(2).contiguous();
  sender.prepare(0, second);
  EXPECT_EQ(second.tensors.at(2).strides(), (at::IntArrayRef{1, 3}));
  Message other = message_of(at::kFloat, 4);
  sender.send(0, second);
  EXPECT_THROW(sender.prepare(0, other), ValueError);
  other.is_void = true;
  sender.prepare(0, other);  // what stands for it is prepared anew
  EXPECT_EQ(other.tensors.at(0).sizes(), at::IntArrayRef{3});
}

TEST_F(DeviceGroupTest, AMessageIsKeptAndCountedUntilItIsSent) {
  constexpr std::int64_t kBytes = 3 * 5 * 4;
  for (int i = 1; i <= 6; ++i) {  // more than a host's group may have under way
    sender.send(0, message_of(at::kFloat, 5));
    EXPECT_EQ(sender.buffer_bytes(), i * kBytes);
  }
  *sending->is_done = true;
  sender.send(0, message_of(at::kFloat, 5));
  EXPECT_EQ(sender.buffer_bytes(), kBytes);
}

TEST_F(DeviceGroupTest, ConnectingWaitsForTheDevice) {
  auto connected = std::async(std::launch::async, [this] { sender.connect(); });
  EXPECT_EQ(connected.wait_for(std::chrono::milliseconds(50)), std::future_status::timeout);
  *sending->is_done = true;
  connected.get();
  EXPECT_EQ(sending->calls, (Calls{"start", "send Byte[1]", "end"}));
  auto aborted = std::async(std::launch::async, [this] { receiver.connect(); });
  receiver.abort();
  EXPECT_THROW(aborted.get(), ChannelAborted);
}

TEST_F(DeviceGroupTest, AFaultAbortsTheGroupsThatAreThere) {
  Fault fault;
  abort_on_fault(fault, receiving);
  {
    const auto gone = c10::make_intrusive<RecordingGroup>();
    abort_on_fault(fault, gone);
  }
  EXPECT_TRUE(receiving->calls.empty());
  fault.raise(Failure{});
  EXPECT_EQ(receiving->calls, Calls{"abort"});
  abort_on_fault(fault, sending);  // made after the fault
  EXPECT_EQ(sending->calls, Calls{"abort"});
}

}  // namespace
}  // namespace pd2
