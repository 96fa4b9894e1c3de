#include "engine/discards.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace pd2 {
namespace {

Failure because(const std::string& cause) {
  Failure failure;
  failure.cause = cause;
  return failure;
}

TEST(Discards, TheEarliestBatchCountsWithAllAfterIt) {
  Discards discards(nullptr);
  EXPECT_EQ(discards.first(), Discards::kNone);
  EXPECT_FALSE(discards.covers(0));
  EXPECT_FALSE(discards.failure());
  discards.discard(5, because("five"));
  discards.discard(7, because("seven"));
  EXPECT_EQ(discards.first(), 5);
  EXPECT_EQ(discards.failure()->second.cause, "five");
  discards.discard(3, because("three"));
  discards.discard(4);
  EXPECT_EQ(discards.first(), 3);
  EXPECT_EQ(discards.failure()->first, 3);
  EXPECT_EQ(discards.failure()->second.cause, "three");
  EXPECT_FALSE(discards.covers(2));
  EXPECT_TRUE(discards.covers(3));
  EXPECT_TRUE(discards.covers(1000));
}

TEST(Discards, WhatHappenedElsewhereHasNoFailureHere) {
  Discards discards(nullptr);
  discards.discard(0);
  EXPECT_EQ(discards.first(), 0);
  EXPECT_FALSE(discards.failure());
}

TEST(Discards, AfterGoingOnLaterBatchesCanBeDiscarded) {
  Discards discards(nullptr);
  discards.discard(2, because("two"));
  discards.go_on();
  EXPECT_EQ(discards.first(), Discards::kNone);
  EXPECT_FALSE(discards.failure());
  discards.discard(6, because("six"));
  EXPECT_EQ(discards.first(), 6);
  EXPECT_EQ(discards.failure()->second.cause, "six");
}

TEST(Discards, ProcessesThatShareMemoryKnowOfItAndGoOnOneAfterTheOther) {
  const std::shared_ptr<SharedBoard> board = SharedBoard::create(2, 1, SharedBoard::Timeout(10));
  ASSERT_TRUE(board);
  const std::shared_ptr<SharedBoard> others =
      SharedBoard::open(board->address(), 1, SharedBoard::Timeout(10));
  ASSERT_TRUE(others);
  Discards one(board);
  Discards other(others);
  one.discard(4, because("four"));
  EXPECT_EQ(other.first(), 4);
  EXPECT_FALSE(other.failure());
  one.go_on();
  EXPECT_EQ(one.first(), Discards::kNone);
  EXPECT_EQ(other.first(), 4);
  one.discard(9, because("nine"));
  other.go_on();  // does not undo what the first one has done since
  EXPECT_EQ(other.first(), 9);
  other.discard(8);
  EXPECT_EQ(one.first(), 8);
}

TEST(Discards, OfManyThreadsTheEarliestCounts) {
  for (int round = 0; round < 50; ++round) {
    Discards discards(nullptr);
    std::vector<std::jthread> threads;
    for (int thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&discards, thread] {
        for (int batch = 40; batch > thread; --batch) {
          discards.discard(batch, because(std::to_string(batch)));
          EXPECT_LE(discards.first(), batch);
        }
      });
    }
    threads.clear();
    EXPECT_EQ(discards.first(), 1);
    EXPECT_EQ(discards.failure()->second.cause, "1");
  }
}

}  // namespace
}  // namespace pd2
