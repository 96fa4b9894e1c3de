#include "engine/channels/device_ring.h"

#include "engine/by_device_type.h"
#include "engine/channels/device_memory_sharing.h"
#include "transport/shared_memory.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

namespace pd2 {
namespace {

using namespace std::chrono_literals;

// The host as a device without streams: what a stream would do is done when it is given.
namespace hosts {

std::atomic<bool> can_open = true;
std::atomic<int> num_allocated = 0;
std::atomic<int> num_streams = 0;  // taken and not given back

MaybeStream take_stream(c10::Device) {
  ++num_streams;
  return std::nullopt;
}

void give_back(const MaybeStream&) { --num_streams; }

std::shared_ptr<std::byte> kept(std::unique_ptr<SharedMemory> memory) {
  std::byte* const data = memory->data();
  return {data, [memory = std::shared_ptr<SharedMemory>(std::move(memory))](std::byte*) {}};
}

std::shared_ptr<std::byte> allocate(c10::Device, std::size_t bytes, std::string& address) {
  std::unique_ptr<SharedMemory> memory = SharedMemory::create(bytes);
  address = memory->address();
  ++num_allocated;
  std::byte* const data = memory->data();
  return {data, [memory = std::shared_ptr<SharedMemory>(std::move(memory))](std::byte*) {
            --num_allocated;
          }};
}

std::shared_ptr<std::byte> open(c10::Device, const std::string& address) {
  std::unique_ptr<SharedMemory> memory = can_open ? SharedMemory::open(address) : nullptr;
  return memory ? kept(std::move(memory)) : nullptr;
}

std::shared_ptr<void> pin(c10::Device, std::byte* pages, std::size_t) {
  return {pages, [](void*) {}};
}

void copy(std::byte* to, const std::byte* from, std::size_t bytes, const MaybeStream&) {
  std::memcpy(to, from, bytes);
}

void set(SharedWord& word, std::uint32_t value, const MaybeStream&) { word = value; }

void await(SharedWord& word, std::uint32_t value, const MaybeStream&) {
  while (static_cast<std::int32_t>(word - value) < 0) {
    std::this_thread::yield();
  }
}

}  // namespace hosts

class DeviceRingTest : public ::testing::Test {
 protected:
  static constexpr std::uint32_t kSlots = 3;

  void SetUp() override {
    by_device_type<DeviceMemorySharing>().set(
        c10::kCPU, {hosts::take_stream, hosts::give_back, hosts::allocate, hosts::open, hosts::pin,
                    hosts::copy, hosts::set, hosts::await});
    auto ring = DeviceRing::create(c10::kCPU, kSlots, 60);
    if (!ring) {
      GTEST_SKIP() << "this system has no memory to share";
    }
    auto other = DeviceRing::open(ring->address(), c10::kCPU, 60);
    ASSERT_TRUE(other);
    sender_ = std::make_unique<DeviceRingSender>(std::move(ring), c10::kCPU, 1);
    receiver_ = std::make_unique<DeviceRingReceiver>(std::move(other), c10::kCPU, 0);
  }
  void TearDown() override {
    hosts::can_open = true;
    sender_.reset();
    receiver_.reset();
    EXPECT_EQ(hosts::num_streams, 0);
  }

  static Message message(const at::Tensor& tensor) {
    Message made;
    made.structure = "one";
    made.tensors = {tensor, at::Tensor(), at::zeros({0})};
    made.requires_grad = {true, false, false};
    return made;
  }
  Message receive(LayoutId layout) {
    receiver_->expect(layout);
    return receiver_->receive();
  }

  std::unique_ptr<DeviceRingSender> sender_;
  std::unique_ptr<DeviceRingReceiver> receiver_;
};

TEST_F(DeviceRingTest, MessagesOfAllLayoutsArriveInOrderWithTheirStrides) {
  constexpr int kCount = 200;
  std::thread sends([&] {
    for (int i = 0; i < kCount; ++i) {
      const int rows = i % 5 == 4 ? 5'000 * (1 + i / 50) : 3;
      sender_->send(rows, message(at::full({rows, 2}, i, at::kShort).t()));
    }
  });
  for (int i = 0; i < kCount; ++i) {
    const int rows = i % 5 == 4 ? 5'000 * (1 + i / 50) : 3;
    const Message got = receive(rows);
    EXPECT_TRUE(got.tensors.at(0).equal(at::full({2, rows}, i, at::kShort)));
    EXPECT_EQ(got.tensors[0].stride(0), 1);
    EXPECT_FALSE(got.tensors.at(1).defined());
    EXPECT_EQ(got.tensors.at(2).numel(), 0);
    EXPECT_EQ(got.structure, "one");
    EXPECT_TRUE(got.requires_grad.at(0));
  }
  sends.join();
}

TEST_F(DeviceRingTest, ASenderIsNoFurtherAheadThanThereAreSlots) {
  for (std::uint32_t i = 0; i < kSlots; ++i) {
    sender_->send(0, message(at::full({2}, i)));
  }
  auto next = std::async(std::launch::async, [&] { sender_->send(0, message(at::full({2}, 9))); });
  EXPECT_EQ(next.wait_for(200ms), std::future_status::timeout);
  EXPECT_EQ(receive(0).tensors[0][0].item<float>(), 0);
  next.get();
}

TEST_F(DeviceRingTest, AVoidMessageIsOneOrHasItsLayout) {
  Message none;
  none.is_void = true;
  sender_->send(0, none);
  EXPECT_TRUE(receive(0).is_void);
  sender_->send(0, message(at::ones({4})));
  sender_->send(0, none);
  EXPECT_FALSE(receive(0).is_void);
  const Message empty = receive(0);
  EXPECT_FALSE(empty.is_void);
  EXPECT_EQ(empty.tensors.at(0).numel(), 4);
}

TEST_F(DeviceRingTest, AMessageOfAnotherLayoutIsRefusedBeforeItIsSent) {
  sender_->send(0, message(at::ones({4})));
  EXPECT_ANY_THROW(sender_->send(0, message(at::ones({5}))));
  sender_->send(0, message(at::full({4}, 2.0)));
  receive(0);
  EXPECT_EQ(receive(0).tensors[0][3].item<float>(), 2);
}

TEST_F(DeviceRingTest, AbortEndsWaitingOfBothEnds) {
  auto waits = std::async(std::launch::async, [&] { return receive(0); });
  EXPECT_EQ(waits.wait_for(50ms), std::future_status::timeout);
  receiver_->abort();
  EXPECT_THROW(waits.get(), ChannelAborted);
  for (std::uint32_t i = 0; i < kSlots; ++i) {
    sender_->send(0, message(at::ones({2})));
  }
  auto full = std::async(std::launch::async, [&] { sender_->send(0, message(at::ones({2}))); });
  EXPECT_EQ(full.wait_for(50ms), std::future_status::timeout);
  sender_->abort();
  EXPECT_THROW(full.get(), ChannelAborted);
  EXPECT_THROW(sender_->send(0, message(at::ones({2}))), ChannelAborted);
}

TEST_F(DeviceRingTest, MemoryIsCountedAndStaysUntilTheReceiverHasClosedIt) {
  const auto before = sender_->buffer_bytes();
  sender_->send(0, message(at::ones({100'000})));
  EXPECT_GE(sender_->buffer_bytes() - before, kSlots * 400'000);
  receive(0);
  sender_.reset();
  EXPECT_EQ(hosts::num_allocated, 2);
  receiver_.reset();
  DeviceRing::create(c10::kCPU, 1, 60);  // when one is closed, what was left is freed
  EXPECT_EQ(hosts::num_allocated, 0);
}

TEST_F(DeviceRingTest, ARingThatCannotBeOpenedIsNone) {
  hosts::can_open = false;
  const auto ring = DeviceRing::create(c10::kCPU, kSlots, 60);
  EXPECT_FALSE(DeviceRing::open(ring->address(), c10::kCPU, 60));
  EXPECT_FALSE(DeviceRing::open("", c10::kCPU, 60));
  EXPECT_FALSE(DeviceRing::create(c10::kMeta, kSlots, 60));
}

}  // namespace
}  // namespace pd2
