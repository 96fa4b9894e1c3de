#include "transport/shared_ring.h"

#include "transport/peer_error.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <future>
#include <signal.h>
#include <stdexcept>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace pd2 {
namespace {

using namespace std::chrono_literals;

class SharedRingTest : public testing::Test {
 protected:
  static constexpr std::uint32_t kSlots = 3;

  void SetUp() override {
    writer_ = SharedRing::create(kSlots, 60s);
    if (!writer_) {
      GTEST_SKIP() << "this system has no memory to share";
    }
    reader_ = SharedRing::open(writer_->address(), 60s);
    ASSERT_TRUE(reader_);
  }

  static bool write(SharedRing& ring, const std::string& text) {
    std::byte* const to = ring.begin_write(text.size());
    if (to == nullptr) {
      return false;
    }
    std::memcpy(to, text.data(), text.size());
    ring.end_write();
    return true;
  }
  static std::string read(SharedRing& ring, std::size_t bytes) {
    const std::byte* const from = ring.begin_read(bytes);
    if (from == nullptr) {
      return "aborted";
    }
    std::string text(reinterpret_cast<const char*>(from), bytes);
    ring.end_read();
    return text;
  }

  std::unique_ptr<SharedRing> writer_, reader_;
};

TEST_F(SharedRingTest, MessagesOfManySizesArriveInOrder) {
  constexpr int kCount = 2000;
  const auto message = [](int i) {
    return std::string(static_cast<std::size_t>(1 + i * 37 % 5000), static_cast<char>(i));
  };
  std::thread writing([&] {
    for (int i = 0; i < kCount; ++i) {
      ASSERT_TRUE(write(*writer_, message(i)));
      if (i % 500 == 0) {
        std::this_thread::sleep_for(2ms);  // the reader goes to sleep
      }
    }
  });
  for (int i = 0; i < kCount; ++i) {
    ASSERT_EQ(read(*reader_, message(i).size()), message(i));
    if (i % 500 == 250) {
      std::this_thread::sleep_for(2ms);  // the writer does
    }
  }
  writing.join();
}

TEST_F(SharedRingTest, TheLargestMessageFits) {
  const std::string message(SharedRing::kMaxMessageBytes, 'x');
  for (std::uint32_t i = 0; i < 2 * kSlots; ++i) {
    ASSERT_TRUE(write(*writer_, message));
    EXPECT_EQ(read(*reader_, message.size()), message);
  }
}

TEST_F(SharedRingTest, AWriterWaitsOnceAllSlotsAreFull) {
  for (std::uint32_t i = 0; i < kSlots; ++i) {
    ASSERT_TRUE(write(*writer_, std::to_string(i)));
  }
  auto written = std::async(std::launch::async, [&] { return write(*writer_, "3"); });
  EXPECT_EQ(written.wait_for(20ms), std::future_status::timeout);
  EXPECT_EQ(read(*reader_, 1), "0");
  EXPECT_TRUE(written.get());
  for (const char* expected : {"1", "2", "3"}) {
    EXPECT_EQ(read(*reader_, 1), expected);
  }
}

TEST_F(SharedRingTest, SlotsAreUsedAgainBeforeFreshOnes) {
  for (int i = 0; i < 10; ++i) {
    ASSERT_TRUE(write(*writer_, std::string(100, 'x')));
    read(*reader_, 100);
  }
  EXPECT_EQ(writer_->used_bytes(), 100);
  EXPECT_EQ(reader_->used_bytes(), 100);
  ASSERT_TRUE(write(*writer_, std::string(150, 'x')));
  ASSERT_TRUE(write(*writer_, std::string(50, 'x')));
  EXPECT_EQ(writer_->used_bytes(), 200);
}

TEST_F(SharedRingTest, WaitingEndsAfterTheTimeout) {
  writer_ = SharedRing::create(kSlots, 200ms);
  reader_ = SharedRing::open(writer_->address(), 200ms);
  ASSERT_TRUE(reader_);
  EXPECT_THROW(read(*reader_, 1), PeerTimeout);
  for (std::uint32_t i = 0; i < kSlots; ++i) {
    ASSERT_TRUE(write(*writer_, "x"));
  }
  EXPECT_THROW(write(*writer_, "x"), PeerTimeout);
}

TEST_F(SharedRingTest, AbortEndsWaitingOfBothEnds) {
  auto received = std::async(std::launch::async, [&] { return read(*reader_, 1); });
  EXPECT_EQ(received.wait_for(20ms), std::future_status::timeout);
  reader_->abort();
  EXPECT_EQ(received.get(), "aborted");
  EXPECT_EQ(read(*reader_, 1), "aborted");

  for (std::uint32_t i = 0; i < kSlots; ++i) {
    ASSERT_TRUE(write(*writer_, "x"));
  }
  auto written = std::async(std::launch::async, [&] { return write(*writer_, "x"); });
  EXPECT_EQ(written.wait_for(20ms), std::future_status::timeout);
  writer_->abort();
  EXPECT_FALSE(written.get());
}

TEST_F(SharedRingTest, OnlyTheRightAddressOpens) {
  const std::string address = writer_->address();
  EXPECT_FALSE(SharedRing::open("", 60s));
  EXPECT_FALSE(SharedRing::open("1" + address, 60s));  // another namespace of processes
  std::string other_cookie = address;
  other_cookie.back() = other_cookie.back() == '1' ? '2' : '1';
  EXPECT_FALSE(SharedRing::open(other_cookie, 60s));
  writer_.reset();
  EXPECT_FALSE(SharedRing::open(address, 60s));
}

TEST_F(SharedRingTest, AnEndedProcessIsNoticed) {
  const std::string address = writer_->address();
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  if (child == 0) {
    const auto ring = SharedRing::open(address, 60s);
    const char opened = ring ? 'y' : 'n';
    _exit(::write(ready[1], &opened, 1) == 1 ? 0 : 1);
  }
  char opened = 'n';
  ASSERT_EQ(::read(ready[0], &opened, 1), 1);
  ASSERT_EQ(opened, 'y');
  // Not waited for yet: a process whose parent has not looked counts as ended, too.
  for (std::uint32_t i = 0; i < kSlots; ++i) {
    ASSERT_TRUE(write(*writer_, "x"));
  }
  EXPECT_THROW(write(*writer_, "x"), PeerLost);
  waitpid(child, nullptr, 0);
  close(ready[0]);
  close(ready[1]);
}

TEST_F(SharedRingTest, AWriterInAnotherProcessThatEndsIsNoticed) {
  int addresses[2];
  ASSERT_EQ(pipe(addresses), 0);
  const pid_t child = fork();
  if (child == 0) {
    const auto ring = SharedRing::create(kSlots, 60s);
    write(*ring, "last words");
    const std::string& address = ring->address();
    const auto length = static_cast<ssize_t>(address.size());
    const bool told = ::write(addresses[1], address.data(), address.size()) == length;
    pause();
    _exit(told ? 0 : 1);
  }
  char address[200] = {};
  ASSERT_GT(::read(addresses[0], address, sizeof address - 1), 0);
  const auto ring = SharedRing::open(address, 60s);
  ASSERT_TRUE(ring);
  kill(child, SIGKILL);
  EXPECT_EQ(read(*ring, 10), "last words");
  EXPECT_THROW(read(*ring, 1), PeerLost);
  waitpid(child, nullptr, 0);
  close(addresses[0]);
  close(addresses[1]);
}

}  // namespace
}  // namespace pd2
