#include "engine/loss/loss_board.h"

#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <thread>
#include <vector>

namespace pd2 {
namespace {

using std::chrono::milliseconds;

const LossWeights kHalf{.divisor = 2, .factors = {}};

at::Tensor number(double value) { return at::full({}, value, at::kDouble); }

TEST(RunLoss, MeansOverAsManyRowsAreAveraged) {
  EXPECT_EQ((RunLoss{{.divisor = 2, .factors = {}}, {number(1), number(4)}}.sum().item<double>()),
            2.5);
}

TEST(RunLoss, MeansOverDifferentRowsHaveFactors) {
  const LossWeights weights{.factors = {0.75, 0.25}};
  EXPECT_EQ((RunLoss{weights, {number(1), number(5)}}.sum().item<double>()), 2.0);
}

TEST(RunLoss, SumsAreAdded) {
  EXPECT_EQ((RunLoss{{}, {number(1), number(4), number(2)}}.sum().item<double>()), 7.0);
}

TEST(LossWeights, TheSeedHasTheWeightOfItsMicrobatch) {
  const LossWeights weights{.factors = {0.75, 0.25}};
  EXPECT_EQ(weights.weighted(number(1), 0).item<double>(), 0.75);
  EXPECT_EQ(weights.weighted(number(1), 1).item<double>(), 0.25);
}

TEST(RunLoss, TheSecondPipelinesPartGoesOnWhereTheFirstOnesEnds) {
  const LossWeights weights{.factors = {0.375, 0.25, 0.25, 0.125}};
  const RunLoss first{weights, {number(8), number(16)}};
  const RunLoss second{weights, {number(4), number(8)}, 2};
  EXPECT_EQ(second.sum(first.sum()).item<double>(), 3 + 4 + 1 + 1);
}

TEST(RunLoss, PartsAddUpInMicrobatchOrder) {
  // 1 would vanish if the second part were added up first.
  const at::Tensor big = at::full({}, 1e8, at::kFloat), one = at::full({}, 1, at::kFloat);
  const RunLoss first{{}, {big}}, second{{}, {-big, one}, 1};
  const at::Tensor first_as_sent = first.sum().to(at::kDouble).reshape({1});
  EXPECT_EQ(second.sum(first_as_sent).item<double>(), 1);
  EXPECT_EQ((first.sum() + second.sum()).item<double>(), 0);
}

struct LossBoardTest : testing::Test {
  std::shared_ptr<Fault> fault = std::make_shared<Fault>();
  LossBoard board{{.ranks = {0, 0}}, fault, nullptr, nullptr};

  void publish(std::int64_t batch, double value) {
    board.publish(batch, RunLoss{kHalf, {number(value), number(value)}});
  }
};

TEST_F(LossBoardTest, LossesAreReadInAnyOrder) {
  const auto first = board.expect(0), second = board.expect(1);
  EXPECT_FALSE(first->are_there());
  EXPECT_FALSE(first->wait_for(milliseconds(1)));
  publish(0, 3);
  publish(1, 4);
  ASSERT_TRUE(second->wait_for(milliseconds(10000)));
  ASSERT_TRUE(first->wait_for(milliseconds(10000)));
  EXPECT_TRUE(first->are_there());
  EXPECT_EQ(first->get().at(0), 3);
  EXPECT_EQ(second->get().at(0), 4);
  EXPECT_TRUE(board.finish_for(milliseconds(10000)));
}

TEST(LossBoardOfLateForwards, WhatNeedsAnotherRunIsNotWaitedFor) {
  const auto fault = std::make_shared<Fault>();
  LossBoard board({.ranks = {0, 0}, .runs_behind = 1}, fault, nullptr, nullptr);
  const auto first = board.expect(0);
  EXPECT_TRUE(board.finish_for(milliseconds(1)));
  const auto second = board.expect(1);
  EXPECT_FALSE(board.finish_for(milliseconds(1)));
  board.publish(0, RunLoss{{}, {number(3)}});
  EXPECT_TRUE(board.finish_for(milliseconds(10000)));
  EXPECT_TRUE(first->are_there());
  board.drain();
  EXPECT_FALSE(board.finish_for(milliseconds(1)));
  board.publish(1, RunLoss{{}, {number(4)}});
  EXPECT_TRUE(board.finish_for(milliseconds(10000)));
  EXPECT_EQ(second->get().at(0), 4);
}

TEST(LossBoardOfLateForwards, ARunThatIsRepeatedLeavesThoseBeforeItDue) {
  const auto fault = std::make_shared<Fault>();
  LossBoard board({.ranks = {0, 0}, .runs_behind = 1}, fault, nullptr, nullptr);
  board.expect(7);
  board.expect(8);
  board.drain();  // both are discarded, and nothing has arrived yet
  const auto again = board.expect(7);
  EXPECT_FALSE(board.finish_for(milliseconds(1)));
  board.publish(7, RunLoss{.losses = {}, .is_discarded = true});
  board.publish(8, RunLoss{.losses = {}, .is_discarded = true});
  EXPECT_TRUE(board.finish_for(milliseconds(10000)));
  EXPECT_FALSE(again->are_there());
  board.drain();
  board.publish(7, RunLoss{{}, {number(4)}});
  ASSERT_TRUE(again->wait_for(milliseconds(10000)));
  EXPECT_EQ(again->get().at(0), 4);
}

TEST(LossBoardOfTwoPipelines, ALossIsThereWhenBothPartsAre) {
  const auto fault = std::make_shared<Fault>();
  LossBoard board({.ranks = {0, 0, 0, 0}, .num_parts = 2}, fault, nullptr, nullptr);
  const auto first = board.expect(0), second = board.expect(1);
  const auto publish = [&](std::int64_t batch, double value, int pipeline) {
    const auto from = static_cast<std::size_t>(pipeline);
    board.publish(batch, RunLoss{kHalf, {number(value)}, from}, pipeline);
  };
  publish(0, 1, 1);
  publish(1, 10, 1);  // a batch ahead of the other
  EXPECT_FALSE(first->wait_for(milliseconds(50)));
  publish(0, 2, 0);
  ASSERT_TRUE(first->wait_for(milliseconds(10000)));
  EXPECT_EQ(first->get().at(0), 1.5);
  EXPECT_FALSE(second->are_there());
  publish(1, 20, 0);
  ASSERT_TRUE(second->wait_for(milliseconds(10000)));
  EXPECT_EQ(second->get().at(0), 15);
  EXPECT_TRUE(board.finish_for(milliseconds(10000)));
}

TEST(LossBoardOfTwoPipelines, MetricsComeAfterTheLossAndAreAdded) {
  const auto fault = std::make_shared<Fault>();
  LossBoard board({.ranks = {0, 0, 0, 0}, .num_parts = 2, .num_numbers = 3}, fault, nullptr,
                  nullptr);
  const auto slot = board.expect(0);
  const auto publish = [&](double value, std::vector<double> metrics, int pipeline) {
    const auto from = static_cast<std::size_t>(pipeline);
    board.publish(0, RunLoss{kHalf, {number(value)}, from, at::tensor(metrics)}, pipeline);
  };
  publish(1, {10, 20}, 0);
  publish(2, {1, 2}, 1);
  ASSERT_TRUE(slot->wait_for(milliseconds(10000)));
  EXPECT_EQ(slot->get(), (std::vector<double>{1.5, 11, 22}));
}

// Of three replicas in one process, and the parts come in another order than they are added up in.
TEST(LossBoardOfReplicas, PartsAreAddedInTheirOrder) {
  const auto fault = std::make_shared<Fault>();
  LossBoard board({.ranks = {0, 0, 0}, .num_parts = 3}, fault, nullptr, nullptr);
  const auto slot = board.expect(0);
  const auto publish = [&](float value, int part) {
    board.publish(0, RunLoss{{}, {at::full({}, value, at::kFloat)}}, part);
  };
  publish(1, 2);
  publish(-1e8F, 1);
  EXPECT_FALSE(slot->wait_for(milliseconds(20)));
  publish(1e8F, 0);
  ASSERT_TRUE(slot->wait_for(milliseconds(10000)));
  EXPECT_EQ(slot->get().at(0), 1);
}

TEST_F(LossBoardTest, AFailureEndsTheWait) {
  const auto slot = board.expect(0);
  fault->raise({.text = "on purpose"});
  EXPECT_THROW(slot->wait_for(milliseconds(1)), PipelineError);
  EXPECT_THROW(board.finish_for(milliseconds(10000)), PipelineError);
}

TEST_F(LossBoardTest, AnUndefinedLossNamesStageAndBatch) {
  const auto slot = board.expect(5);
  board.publish(5, RunLoss{{}, {at::Tensor()}});
  while (!fault->raised()) {
    std::this_thread::yield();
  }
  EXPECT_THROW(slot->wait_for(milliseconds(1)), PipelineError);
  const Failure failure = fault->failure().value();
  EXPECT_EQ(failure.text.find("stage 1, batch 5, loss: sending it failed: "), 0u) << failure.text;
  EXPECT_EQ(failure.type, "StageError");
  EXPECT_EQ(failure.stage, 1);
  EXPECT_EQ(failure.batch, 5);
  EXPECT_EQ(failure.action, "loss");
}

TEST_F(LossBoardTest, WhatWasPublishedOutlivesTheThread) {
  const auto there = board.expect(0), never = board.expect(1);
  publish(0, 3);
  board.close();
  ASSERT_TRUE(there->are_there());
  EXPECT_EQ(there->get().at(0), 3);
  EXPECT_FALSE(never->are_there());
}

}  // namespace
}  // namespace pd2
