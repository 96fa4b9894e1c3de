// Messages by way of the host's memory. Here the device is the host too: its copies are at once.
#include "engine/channels/staged_channel.h"

#include "core/check.h"
#include "engine/channels/local_channel.h"
#include "engine/channels/process_group_channel.h"
#include "mailbox_group.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <future>

namespace pd2 {
namespace {

using namespace std::chrono_literals;

class StagedChannelTest : public ::testing::Test {
 protected:
  static Message message_of(std::vector<at::Tensor> tensors) {
    Message message;
    message.requires_grad.assign(tensors.size(), true);
    message.tensors = std::move(tensors);
    return message;
  }
  static Peer peer(int rank, const std::shared_ptr<Mailbox>& mailbox) {
    return {c10::make_intrusive<MailboxGroup>(rank, mailbox), 1 - rank, 1 - rank};
  }

  std::shared_ptr<Mailbox> mailbox = std::make_shared<Mailbox>();
  StagedSender sender{std::make_shared<ProcessGroupSender>(peer(0, mailbox), 2), at::kCPU,
                      std::make_shared<Fault>()};
  StagedReceiver receiver{std::make_shared<ProcessGroupReceiver>(peer(1, mailbox), 2), at::kCPU};
};

TEST_F(StagedChannelTest, MessagesArriveInOrderWithTheirStridesAndGaps) {
  for (int i = 0; i < 20; ++i) {
    receiver.expect(i % 2);
    sender.send(i % 2,
                message_of({at::full({3, 2 + i % 2}, i).t(), at::Tensor(), at::ones({0, 3})}));
  }
  for (int i = 0; i < 20; ++i) {
    const Message received = receiver.receive();
    EXPECT_TRUE(received.tensors.at(0).equal(at::full({2 + i % 2, 3}, i)));
    EXPECT_EQ(received.tensors.at(0).stride(0), 1);
    EXPECT_FALSE(received.tensors.at(1).defined());
    EXPECT_EQ(received.tensors.at(2).sizes(), (at::IntArrayRef{0, 3}));
  }
}

TEST_F(StagedChannelTest, TheSenderDoesNotWaitAndSendsWhatWasThereWhenItWasCalled) {
  const at::Tensor reused = at::ones({4});
  for (int i = 0; i < 8; ++i) {  // more than the other sender has under way
    reused.fill_(i);
    sender.send(0, message_of({reused}));
  }
  EXPECT_GE(sender.buffer_bytes(), 5 * reused.nbytes());
  for (int i = 0; i < 8; ++i) {
    receiver.expect(0);
    EXPECT_EQ(receiver.receive().tensors.at(0)[0].item<int>(), i);
  }
}

TEST_F(StagedChannelTest, AMessageThatIsNotOfItsLayoutIsRefusedBeforeItIsSent) {
  sender.send(0, message_of({at::ones({3})}));
  EXPECT_THROW(sender.send(0, message_of({at::ones({4})})), ValueError);
  sender.send(0, message_of({at::full({3}, 2.0)}));
  receiver.expect(0);
  receiver.expect(0);
  EXPECT_EQ(receiver.receive().tensors.at(0)[0].item<int>(), 1);
  EXPECT_EQ(receiver.receive().tensors.at(0)[0].item<int>(), 2);
}

TEST_F(StagedChannelTest, VoidMessagesTravelAsWithoutStaging) {
  Message none;
  none.is_void = true;
  sender.send(0, none);
  sender.send(0, message_of({at::ones({3})}));
  sender.send(0, none);
  for (int i = 0; i < 3; ++i) {
    receiver.expect(0);
  }
  EXPECT_TRUE(receiver.receive().is_void);
  EXPECT_EQ(receiver.receive().tensors.at(0).sum().item<int>(), 3);
  const Message zeros = receiver.receive();
  EXPECT_FALSE(zeros.is_void);
  EXPECT_EQ(zeros.tensors.at(0).sum().item<int>(), 0);
}

TEST_F(StagedChannelTest, AbortEndsBothEnds) {
  receiver.expect(0);
  auto received = std::async(std::launch::async, [this] { return receiver.receive(); });
  std::this_thread::sleep_for(20ms);
  receiver.abort();
  EXPECT_THROW(received.get(), ChannelAborted);
  for (int i = 0; i < 8; ++i) {  // nobody receives them
    sender.send(0, message_of({at::ones({1})}));
  }
  sender.abort();
  EXPECT_THROW(sender.send(0, message_of({at::ones({1})})), ChannelAborted);
}

TEST(StagedSenderTest, WhatTheOtherSenderThrowsRaisesTheFaultAndTheNextSendThrowsIt) {
  struct Failing : Sender {
    void abort() override {}
    void transfer(LayoutId, Message) override { throw std::runtime_error("no line"); }
  };
  const auto fault = std::make_shared<Fault>(3);
  StagedSender sender(std::make_shared<Failing>(), at::kCPU, fault);
  sender.send(0, {});  // the last one
  for (int i = 0; i < 1000 && !fault->raised(); ++i) {
    std::this_thread::sleep_for(10ms);
  }
  ASSERT_TRUE(fault->raised());
  EXPECT_EQ(fault->failure()->rank, 3);
  EXPECT_EQ(fault->failure()->cause, "no line");
  sender.abort();  // as the fault ends all channels
  try {
    sender.send(0, {});
    FAIL() << "sent";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "no line");
  }
}

TEST(StagedSenderTest, TheEndOfThePipelineRaisesNoFault) {
  struct Ended : Sender {
    std::promise<void> is_ended;
    void abort() override { is_ended.set_value(); }
    void transfer(LayoutId, Message) override {
      is_ended.get_future().wait();
      throw ChannelAborted();
    }
  };
  const auto fault = std::make_shared<Fault>();
  { StagedSender(std::make_shared<Ended>(), at::kCPU, fault).send(0, {}); }
  EXPECT_FALSE(fault->raised());
}

}  // namespace
}  // namespace pd2
