#include "core/check.h"
#include "delays/delayed_sender.h"
#include "engine/channels/local_channel.h"
#include "engine/channels/process_group_channel.h"
#include "mailbox_group.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/conj.h>
#include <ATen/ops/full.h>
#include <ATen/ops/imag.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <future>
#include <thread>

namespace pd2 {
namespace {

using namespace std::chrono_literals;

Message message_of(std::vector<at::Tensor> tensors, std::string structure = "") {
  Message message;
  message.structure = std::move(structure);
  message.requires_grad.assign(tensors.size(), false);
  message.tensors = std::move(tensors);
  return message;
}

TEST(LocalChannelTest, MessagesArriveInOrderWithoutACopy) {
  LocalChannel channel(at::kCPU, at::kCPU);
  const at::Tensor first = at::ones({2}), second = at::ones({3});
  channel.send(0, message_of({first}));
  channel.send(0, message_of({second}, "s"));
  EXPECT_TRUE(channel.receive().tensors[0].is_same(first));
  const Message received = channel.receive();
  EXPECT_TRUE(received.tensors[0].is_same(second));
  EXPECT_EQ(received.structure, "s");
}

TEST(LocalChannelTest, AReceiverWaitsForTheSender) {
  LocalChannel channel(at::kCPU, at::kCPU);
  auto received = std::async(std::launch::async, [&] { return channel.receive(); });
  EXPECT_EQ(received.wait_for(20ms), std::future_status::timeout);
  channel.send(0, message_of({at::ones({2})}));
  EXPECT_EQ(received.get().tensors.size(), 1u);
}

TEST(LocalChannelTest, AbortEndsAWaitingReceiverAndLaterOnes) {
  LocalChannel channel(at::kCPU, at::kCPU);
  auto received = std::async(std::launch::async, [&] { return channel.receive(); });
  std::this_thread::sleep_for(10ms);
  channel.abort();
  EXPECT_THROW(received.get(), ChannelAborted);
  EXPECT_THROW(channel.receive(), ChannelAborted);
}

class DelayedSenderTest : public ::testing::Test {
 protected:
  using Seconds = DelayedSender::Seconds;

  static double seconds_since(std::chrono::steady_clock::time_point start) {
    return Seconds(std::chrono::steady_clock::now() - start).count();
  }

  std::shared_ptr<LocalChannel> channel = std::make_shared<LocalChannel>(at::kCPU, at::kCPU);
};

TEST_F(DelayedSenderTest, MessagesArriveLaterAndNeitherEndWaits) {
  DelayedSender sender(channel, 0.2s, 0.2s, 0);
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < 3; ++i) {
    sender.send(0, message_of({at::full({1}, i)}));
  }
  EXPECT_LT(seconds_since(start), 0.15);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(channel->receive().tensors[0].item<int>(), i);
    EXPECT_GE(seconds_since(start), 0.2);
  }
  EXPECT_LT(seconds_since(start), 0.4);  // they were under way together
}

TEST_F(DelayedSenderTest, RandomDelaysKeepTheOrder) {
  DelayedSender sender(channel, 0s, 0.004s, 7);
  for (int i = 0; i < 50; ++i) {
    sender.send(0, message_of({at::full({1}, i)}));
  }
  for (int i = 0; i < 50; ++i) {
    EXPECT_EQ(channel->receive().tensors[0].item<int>(), i);
  }
}

TEST_F(DelayedSenderTest, AbortEndsTheReceiverAndLaterSends) {
  DelayedSender sender(channel, 60s, 60s, 0);
  sender.send(0, message_of({at::ones({1})}));
  auto received = std::async(std::launch::async, [&] { return channel->receive(); });
  sender.abort();
  EXPECT_THROW(received.get(), ChannelAborted);
  EXPECT_THROW(sender.send(0, message_of({})), ChannelAborted);
}  // and nobody waits for the minute

TEST_F(DelayedSenderTest, WhatTheSenderThrowsTheNextSendThrows) {
  struct Failing : Sender {
    void abort() override {}
    void transfer(LayoutId, Message) override { throw std::runtime_error("no line"); }
  };
  DelayedSender sender(std::make_shared<Failing>(), 0s, 0s, 0);
  EXPECT_THROW(
      for (int i = 0; i < 1000; ++i) {
        sender.send(0, message_of({}));
        std::this_thread::sleep_for(10ms);
      },
      std::runtime_error);
}

TEST_F(DelayedSenderTest, DelaysHaveBounds) {
  EXPECT_THROW(DelayedSender(channel, -1s, 0s, 0), ValueError);
  EXPECT_THROW(DelayedSender(channel, 2s, 1s, 0), ValueError);
}

// The parameter: whether there is memory that both processes share.
class ProcessGroupChannelTest : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    std::shared_ptr<SharedRing> writing, reading;
    if (GetParam()) {
      writing = SharedRing::create(5, std::chrono::seconds(60));
      if (!writing) {
        GTEST_SKIP() << "this system has no memory to share";
      }
      reading = SharedRing::open(writing->address(), std::chrono::seconds(60));
      ASSERT_TRUE(reading);
    }
    auto mailbox = std::make_shared<Mailbox>();
    sender_ = std::make_unique<ProcessGroupSender>(
        Peer{c10::make_intrusive<MailboxGroup>(0, mailbox), 1, 1, at::kCPU, writing}, 4);
    receiver_ = std::make_unique<ProcessGroupReceiver>(
        Peer{c10::make_intrusive<MailboxGroup>(1, mailbox), 0, 0, at::kCPU, reading}, 2);
  }

  // Sends on another thread: a send may wait for its receive.
  std::future<void> send(LayoutId layout, Message message) {
    return std::async(std::launch::async, [this, layout, message = std::move(message)]() mutable {
      sender_->send(layout, std::move(message));
    });
  }

  std::unique_ptr<ProcessGroupSender> sender_;
  std::unique_ptr<ProcessGroupReceiver> receiver_;
};

TEST_P(ProcessGroupChannelTest, ShapesDtypesStridesAndStructureArrive) {
  Message message = message_of({at::arange(6).reshape({2, 3}).t(), at::ones({2, 2}, at::kBool),
                                at::Tensor(), at::ones({0, 3})},
                               std::string("a\0b", 3));
  message.requires_grad = {true, false, false, false};
  const at::Tensor transposed = message.tensors[0];
  receiver_->expect(5);
  auto sent = send(5, std::move(message));
  const Message received = receiver_->receive();
  sent.get();
  EXPECT_EQ(received.structure, std::string("a\0b", 3));
  EXPECT_EQ(received.requires_grad, (std::vector<bool>{true, false, false, false}));
  EXPECT_TRUE(received.tensors[0].equal(transposed));
  EXPECT_EQ(received.tensors[0].strides(), transposed.strides());
  EXPECT_EQ(received.tensors[1].scalar_type(), at::kBool);
  EXPECT_FALSE(received.tensors[2].defined());
  EXPECT_EQ(received.tensors[3].sizes(), (at::IntArrayRef{0, 3}));
}

TEST_P(ProcessGroupChannelTest, ManyMessagesOfTwoLayoutsArriveInOrder) {
  constexpr int kCount = 40;
  auto all = std::async(std::launch::async, [&] {
    for (int i = 0; i < kCount; ++i) {
      sender_->send(i % 2, message_of({at::full({2 + i % 2}, i)}));
    }
  });
  for (int i = 0; i < kCount; ++i) {
    receiver_->expect(i % 2);
  }
  for (int i = 0; i < kCount; ++i) {
    const at::Tensor received = receiver_->receive().tensors[0];
    EXPECT_EQ(received.numel(), 2 + i % 2);
    EXPECT_EQ(received[0].item<float>(), static_cast<float>(i));
  }
  all.get();
}

TEST_P(ProcessGroupChannelTest, ConjugatesAndNegativesArriveAsTheirValues) {
  const at::Tensor complex = at::complex(at::ones({3}), at::arange(3, at::kFloat));
  receiver_->expect(0);
  auto sent = send(0, message_of({at::conj(complex), at::imag(at::conj(complex))}));
  const Message received = receiver_->receive();
  sent.get();
  EXPECT_TRUE(received.tensors[0].equal(at::conj(complex).resolve_conj()));
  EXPECT_TRUE(received.tensors[1].equal(-at::arange(3, at::kFloat)));
}

TEST_P(ProcessGroupChannelTest, AValueThatChangesWhetherItNeedsAGradientIsRefused) {
  receiver_->expect(0);
  Message first = message_of({at::ones({3})});
  first.requires_grad = {true};
  auto sent = send(0, std::move(first));
  EXPECT_TRUE(receiver_->receive().requires_grad[0]);
  sent.get();
  EXPECT_THROW(sender_->send(0, message_of({at::ones({3})})), ValueError);
}

TEST_P(ProcessGroupChannelTest, AMissingTensorOfAKnownLayoutTravelsAsZeros) {
  receiver_->expect(0);
  receiver_->expect(0);
  auto sent = std::async(std::launch::async, [&] {
    sender_->send(0, message_of({at::ones({3})}));
    Message empty = message_of({at::Tensor()});
    sender_->send(0, std::move(empty));
  });
  EXPECT_EQ(receiver_->receive().tensors[0].sum().item<float>(), 3);
  EXPECT_EQ(receiver_->receive().tensors[0].sum().item<float>(), 0);
  sent.get();
}

TEST_P(ProcessGroupChannelTest, AShapeThatChangesWithinALayoutIsRefused) {
  receiver_->expect(0);
  auto sent = send(0, message_of({at::ones({3})}));
  receiver_->receive();
  sent.get();
  EXPECT_THROW(sender_->send(0, message_of({at::ones({4})})), ValueError);
  EXPECT_THROW(sender_->send(0, message_of({at::ones({3})}, "other")), ValueError);
}

TEST_P(ProcessGroupChannelTest, MessagesTooLargeForTheRingAndOthersArriveInOrder) {
  constexpr std::int64_t kFloats = SharedRing::kMaxMessageBytes / sizeof(float);
  const std::vector<std::int64_t> sizes{kFloats, 3, kFloats + 1};
  constexpr int kCount = 9;
  auto all = std::async(std::launch::async, [&] {
    for (int i = 0; i < kCount; ++i) {
      sender_->send(i % 3, message_of({at::full({sizes[i % 3]}, 1.0 * i)}));
    }
  });
  for (int i = 0; i < kCount; ++i) {
    receiver_->expect(i % 3);
  }
  for (int i = 0; i < kCount; ++i) {
    EXPECT_TRUE(receiver_->receive().tensors[0].equal(at::full({sizes[i % 3]}, 1.0 * i)));
  }
  all.get();
  if (GetParam()) {
    const auto most = static_cast<std::int64_t>(SharedRing::kMaxMessageBytes);
    const std::int64_t in_ring = sender_->buffer_bytes() - 3 * (most + 4);  // 3 are kept
    EXPECT_GE(in_ring, most);
    EXPECT_LE(in_ring, 5 * most);
  }
}

TEST_P(ProcessGroupChannelTest, AbortEndsAWaitingReceiver) {
  receiver_->expect(0);
  auto received = std::async(std::launch::async, [&] { return receiver_->receive(); });
  std::this_thread::sleep_for(50ms);
  receiver_->abort();
  EXPECT_THROW(received.get(), ChannelAborted);
}

TEST_P(ProcessGroupChannelTest, AbortEndsAReceiverThatWaitsForAKnownLayout) {
  receiver_->expect(0);
  receiver_->expect(0);
  auto sent = send(0, message_of({at::ones({3})}));
  receiver_->receive();
  sent.get();
  auto received = std::async(std::launch::async, [&] { return receiver_->receive(); });
  std::this_thread::sleep_for(50ms);
  receiver_->abort();
  EXPECT_THROW(received.get(), ChannelAborted);
}

INSTANTIATE_TEST_SUITE_P(All, ProcessGroupChannelTest, testing::Bool(),
                         [](const auto& info) { return info.param ? "Ring" : "Group"; });

}  // namespace
}  // namespace pd2
