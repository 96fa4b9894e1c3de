#include "engine/loss_board.h"

#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <vector>

namespace pd2 {
namespace {

using std::chrono::milliseconds;

at::Tensor number(double value) { return at::full({}, value, at::kDouble); }

TEST(BatchLoss, MeansOfEqualMicrobatchesAreAveraged) {
  EXPECT_EQ((BatchLoss{{4, 4}, {number(1), number(4)}}.sum().item<double>()), 2.5);
}

TEST(BatchLoss, MeansAreWeightedByTheirRows) {
  EXPECT_EQ((BatchLoss{{3, 1}, {number(1), number(5)}}.sum().item<double>()), 2.0);
}

TEST(BatchLoss, SumsAreAdded) {
  EXPECT_EQ((BatchLoss{{}, {number(1), number(4), number(2)}}.sum().item<double>()), 7.0);
}

TEST(BatchLoss, TheSeedHasTheWeightOfItsMicrobatch) {
  const BatchLoss loss{{3, 1}, {}};
  EXPECT_EQ(loss.weighted(number(1), 0).item<double>(), 0.75);
  EXPECT_EQ(loss.weighted(number(1), 1).item<double>(), 0.25);
}

struct LossBoardTest : testing::Test {
  std::shared_ptr<Fault> fault = std::make_shared<Fault>();
  LossBoard board{fault, nullptr, {0, 0}, 0, 1};

  void publish(std::int64_t batch, double value) {
    board.publish(batch, BatchLoss{{1, 1}, {number(value), number(value)}});
  }
};

TEST_F(LossBoardTest, LossesAreReadInAnyOrder) {
  const auto first = board.expect(0), second = board.expect(1);
  EXPECT_FALSE(board.done(*first));
  EXPECT_FALSE(board.wait_for(*first, milliseconds(1)));
  publish(0, 3);
  publish(1, 4);
  ASSERT_TRUE(board.wait_for(*second, milliseconds(10000)));
  ASSERT_TRUE(board.wait_for(*first, milliseconds(10000)));
  EXPECT_TRUE(board.done(*first));
  EXPECT_EQ(*first->value, 3);
  EXPECT_EQ(*second->value, 4);
  EXPECT_TRUE(board.finish_for(milliseconds(10000)));
}

TEST_F(LossBoardTest, AFailureEndsTheWait) {
  const auto slot = board.expect(0);
  fault->raise("on purpose");
  EXPECT_THROW(board.wait_for(*slot, milliseconds(10000)), PipelineError);
  EXPECT_THROW(board.finish_for(milliseconds(10000)), PipelineError);
}

TEST_F(LossBoardTest, AnUndefinedLossNamesStageAndBatch) {
  const auto slot = board.expect(5);
  board.publish(5, BatchLoss{{1}, {at::Tensor()}});
  EXPECT_THROW(board.wait_for(*slot, milliseconds(10000)), PipelineError);
  EXPECT_EQ(fault->cause().find("stage 1, batch 5, loss: "), 0u) << fault->cause();
}

TEST_F(LossBoardTest, WhatWasPublishedOutlivesTheThread) {
  const auto there = board.expect(0), never = board.expect(1);
  publish(0, 3);
  board.close();
  ASSERT_TRUE(board.done(*there));
  EXPECT_EQ(*there->value, 3);
  EXPECT_FALSE(board.done(*never));
}

}  // namespace
}  // namespace pd2
