#include "transport/shared_board.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <future>
#include <memory>
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

constexpr int kRanks = 3;
constexpr int kRow = 2;

std::vector<std::int64_t> row_of(int rank, int exchange) { return {rank, 10 * exchange + rank}; }

std::vector<std::int64_t> rows(int exchange) {
  std::vector<std::int64_t> all;
  for (int rank = 0; rank < kRanks; ++rank) {
    const std::vector<std::int64_t> row = row_of(rank, exchange);
    all.insert(all.end(), row.begin(), row.end());
  }
  return all;
}

// What waiting throws; empty if it does not.
template <typename Wait>
std::string error_of(Wait wait) {
  try {
    wait();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

class SharedBoardTest : public testing::Test {
 protected:
  void SetUp() override { make(60s); }

  void make(SharedBoard::Timeout timeout) {
    boards_.clear();
    boards_.push_back(SharedBoard::create(kRanks, kRow, timeout));
    if (!boards_[0]) {
      GTEST_SKIP() << "this system has no memory to share";
    }
    for (int rank = 1; rank < kRanks; ++rank) {
      boards_.push_back(SharedBoard::open(boards_[0]->address(), rank, timeout));
      ASSERT_TRUE(boards_[rank]);
    }
  }

  // A process that opens the board of `rank` in place of the one here, and ends after `work` or
  // when it is killed; returns when it has the board.
  template <typename Work>
  pid_t fork_rank(int rank, Work work) {
    const std::string address = boards_[0]->address();
    boards_[rank].reset();
    int ready[2];
    EXPECT_EQ(pipe(ready), 0);
    const pid_t child = fork();
    if (child == 0) {
      const auto board = SharedBoard::open(address, rank, 60s);
      const char opened = board ? 'y' : 'n';
      const bool told = ::write(ready[1], &opened, 1) == 1;
      work(*board);
      _exit(told ? 0 : 1);
    }
    char opened = 'n';
    EXPECT_EQ(::read(ready[0], &opened, 1), 1);
    EXPECT_EQ(opened, 'y');
    close(ready[0]);
    close(ready[1]);
    return child;
  }

  std::vector<std::unique_ptr<SharedBoard>> boards_;  // by rank
};

TEST_F(SharedBoardTest, EveryRankGetsTheRowsOfEveryExchange) {
  constexpr int kCount = 3000;
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([&, rank] {
      for (int i = 0; i < kCount; ++i) {
        if (i % 100 == rank) {
          std::this_thread::sleep_for(1ms);  // each is now and then the one that others wait for
        }
        boards_[rank]->begin_exchange(row_of(rank, i));
        ASSERT_EQ(boards_[rank]->finish_exchange(60s), rows(i));
      }
    });
  }
  for (std::thread& rank : ranks) {
    rank.join();
  }
}

TEST_F(SharedBoardTest, AnExchangeEndsWhenTheLastRankHasBegun) {
  boards_[0]->begin_exchange(row_of(0, 0));
  boards_[1]->begin_exchange(row_of(1, 0));
  EXPECT_EQ(boards_[0]->finish_exchange(20ms), std::nullopt);
  EXPECT_EQ(boards_[1]->finish_exchange(0s), std::nullopt);
  boards_[2]->begin_exchange(row_of(2, 0));
  for (const auto& board : boards_) {
    EXPECT_EQ(board->finish_exchange(0s), rows(0));
  }
}

TEST_F(SharedBoardTest, RowsStayUntilTheSlowestRankHasReadThem) {
  for (int rank = 0; rank < kRanks; ++rank) {
    boards_[rank]->begin_exchange(row_of(rank, 0));
  }
  for (int rank = 0; rank < kRanks - 1; ++rank) {
    boards_[rank]->finish_exchange(0s);
    boards_[rank]->begin_exchange(row_of(rank, 1));
  }
  EXPECT_EQ(boards_[2]->finish_exchange(0s), rows(0));
  boards_[2]->begin_exchange(row_of(2, 1));
  EXPECT_EQ(boards_[2]->finish_exchange(0s), rows(1));
}

TEST_F(SharedBoardTest, ARowOfAnotherSizeIsAnError) {
  const std::vector<std::int64_t> row{1, 2, 3};
  EXPECT_THROW(boards_[0]->begin_exchange(row), std::invalid_argument);
}

TEST_F(SharedBoardTest, ALateReaderReceivesEveryNumber) {
  constexpr int kCount = 1000;  // the ring is gone through many times
  const std::vector<int> readers{0, 2};
  std::thread sending([&] {
    for (int i = 0; i < kCount; ++i) {
      boards_[1]->send(std::sqrt(i), readers);
    }
  });
  std::vector<std::thread> receiving;
  for (const int reader : readers) {
    receiving.emplace_back([&, reader] {
      for (int i = 0; i < kCount; ++i) {
        if (i % 200 == 100 * (reader == 0)) {
          std::this_thread::sleep_for(5ms);  // the sender waits for room
        }
        ASSERT_EQ(boards_[reader]->receive(1), std::sqrt(i));
      }
    });
  }
  sending.join();
  for (std::thread& reader : receiving) {
    reader.join();
  }
}

TEST_F(SharedBoardTest, ASenderWaitsForTheSlowestReader) {
  const std::vector<int> readers{1, 2};
  for (std::uint32_t i = 0; i < SharedBoard::kRoom; ++i) {
    boards_[0]->send(i, readers);
    boards_[1]->receive(0);
  }
  auto sent = std::async(std::launch::async, [&] { boards_[0]->send(-1, readers); });
  EXPECT_EQ(sent.wait_for(20ms), std::future_status::timeout);
  EXPECT_EQ(boards_[2]->receive(0), 0);
  sent.get();
  for (std::uint32_t i = 1; i < SharedBoard::kRoom; ++i) {
    EXPECT_EQ(boards_[2]->receive(0), i);
  }
  EXPECT_EQ(boards_[2]->receive(0), -1);
}

TEST_F(SharedBoardTest, RanksSendToEachOtherSideBySide) {
  boards_[0]->send(0.5, std::vector{1});
  boards_[1]->send(1.5, std::vector{0, 2});
  EXPECT_EQ(boards_[2]->receive(1), 1.5);
  EXPECT_EQ(boards_[1]->receive(0), 0.5);
  EXPECT_EQ(boards_[0]->receive(1), 1.5);
}

TEST_F(SharedBoardTest, SendingAndReceivingEndAfterTheTimeout) {
  make(200ms);
  EXPECT_NE(error_of([&] { boards_[1]->receive(0); }).find("timeout"), std::string::npos);
  for (std::uint32_t i = 0; i < SharedBoard::kRoom; ++i) {
    boards_[0]->send(i, std::vector{1});
  }
  EXPECT_NE(error_of([&] { boards_[0]->send(0, std::vector{1}); }).find("timeout"),
            std::string::npos);
}

TEST_F(SharedBoardTest, LeavingEndsAllWaitingHere) {
  for (std::uint32_t i = 0; i < SharedBoard::kRoom; ++i) {
    boards_[0]->send(i, std::vector{1});
  }
  boards_[0]->begin_exchange(row_of(0, 0));
  auto exchange = std::async(std::launch::async, [&] { boards_[0]->finish_exchange(60s); });
  auto receive = std::async(std::launch::async, [&] { return boards_[0]->receive(2); });
  auto send = std::async(std::launch::async, [&] { boards_[0]->send(-1, std::vector{1}); });
  EXPECT_EQ(exchange.wait_for(20ms), std::future_status::timeout);
  boards_[0]->leave();
  EXPECT_THROW(exchange.get(), std::runtime_error);
  EXPECT_EQ(receive.get(), std::nullopt);
  send.get();
  EXPECT_EQ(boards_[0]->receive(2), std::nullopt);
}

TEST_F(SharedBoardTest, WhoWaitsForARankThatLeavesLearnsIt) {
  boards_[0]->begin_exchange(row_of(0, 0));
  const auto start = std::chrono::steady_clock::now();
  auto exchange = std::async(std::launch::async,
                             [&] { return error_of([&] { boards_[0]->finish_exchange(60s); }); });
  auto receive =
      std::async(std::launch::async, [&] { return error_of([&] { boards_[1]->receive(2); }); });
  EXPECT_EQ(exchange.wait_for(20ms), std::future_status::timeout);
  boards_[2]->leave();
  EXPECT_EQ(exchange.get(), "rank 2 has left the pipeline");
  EXPECT_EQ(receive.get(), "rank 2 has left the pipeline");
  EXPECT_LT(std::chrono::steady_clock::now() - start, 10s);
}

TEST_F(SharedBoardTest, WhatARankDidBeforeItLeftCounts) {
  for (int rank = 0; rank < kRanks; ++rank) {
    boards_[rank]->begin_exchange(row_of(rank, 0));
  }
  boards_[2]->send(7, std::vector{0, 1});
  boards_[2]->leave();
  boards_[2].reset();
  EXPECT_EQ(boards_[0]->finish_exchange(60s), rows(0));
  EXPECT_EQ(boards_[0]->receive(2), 7);
  EXPECT_EQ(error_of([&] { boards_[0]->receive(2); }), "rank 2 has left the pipeline");
}

TEST_F(SharedBoardTest, ProcessesExchangeAndSend) {
  constexpr int kCount = 200;
  const pid_t child = fork_rank(2, [](SharedBoard& board) {
    for (int i = 0; i < kCount; ++i) {
      board.begin_exchange(row_of(2, i));
      if (board.finish_exchange(60s) != rows(i)) {
        _exit(2);
      }
      board.send(i, std::vector{0, 1});
    }
  });
  for (int i = 0; i < kCount; ++i) {
    boards_[0]->begin_exchange(row_of(0, i));
    boards_[1]->begin_exchange(row_of(1, i));
    ASSERT_EQ(boards_[0]->finish_exchange(60s), rows(i));
    ASSERT_EQ(boards_[1]->finish_exchange(60s), rows(i));
    ASSERT_EQ(boards_[0]->receive(2), i);
    ASSERT_EQ(boards_[1]->receive(2), i);
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

TEST_F(SharedBoardTest, AForkedChildThatDropsItsParentsBoardDoesNotLeaveForIt) {
  const pid_t child = fork();
  if (child == 0) {
    boards_[2].reset();
    _exit(0);
  }
  waitpid(child, nullptr, 0);
  boards_[0]->begin_exchange(row_of(0, 0));
  EXPECT_EQ(boards_[0]->finish_exchange(200ms), std::nullopt);
}

TEST_F(SharedBoardTest, AnEndedProcessIsNoticed) {
  const pid_t child = fork_rank(2, [](SharedBoard& board) {
    board.send(7, std::vector{0});
    pause();
  });
  EXPECT_EQ(boards_[0]->receive(2), 7);
  boards_[0]->begin_exchange(row_of(0, 0));
  EXPECT_EQ(boards_[0]->finish_exchange(200ms), std::nullopt);
  for (std::uint32_t i = 0; i < SharedBoard::kRoom; ++i) {
    boards_[0]->send(i, std::vector{2});
  }
  const auto start = std::chrono::steady_clock::now();
  kill(child, SIGKILL);  // its parent does not look yet: it counts as ended nevertheless
  EXPECT_EQ(error_of([&] { boards_[0]->finish_exchange(60s); }), "the process of rank 2 has ended");
  EXPECT_EQ(error_of([&] { boards_[0]->receive(2); }), "the process of rank 2 has ended");
  EXPECT_EQ(error_of([&] { boards_[0]->send(0, std::vector{2}); }),
            "the process of rank 2 has ended");
  waitpid(child, nullptr, 0);
  // First looked at when its number is nobody's any more.
  EXPECT_EQ(error_of([&] { boards_[1]->finish_exchange(60s); }), "the process of rank 2 has ended");
  EXPECT_LT(std::chrono::steady_clock::now() - start, 10s);
}

TEST(SharedBoard, OnlyTheRightAddressOpens) {
  auto board = SharedBoard::create(kRanks, kRow, 60s);
  if (!board) {
    GTEST_SKIP() << "this system has no memory to share";
  }
  const std::string address = board->address();
  EXPECT_FALSE(SharedBoard::open("", 1, 60s));
  EXPECT_FALSE(SharedBoard::open("1" + address, 1, 60s));  // another namespace of processes
  EXPECT_TRUE(SharedBoard::open(address, 1, 60s));
  board.reset();
  EXPECT_FALSE(SharedBoard::open(address, 1, 60s));
}

}  // namespace
}  // namespace pd2
