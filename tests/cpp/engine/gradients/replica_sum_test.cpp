#include "engine/gradients/replica_sum.h"

#include "core/check.h"
#include "engine/channels/channel.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

namespace pd2 {
namespace {

class Done : public c10d::Work {
 public:
  Done() { finish(); }
};

// A sum to which the other replica never comes.
class Never : public c10d::Work {};

// Another replica that has the same gradients.
class Alike : public c10d::ProcessGroup {
 public:
  Alike() : c10d::ProcessGroup(0, 2) {}
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions&) override {
    summed.push_back(tensors.front().numel());
    if (is_lost) {
      return c10::make_intrusive<Never>();
    }
    tensors.front().mul_(2);
    return c10::make_intrusive<Done>();
  }
  bool is_lost = false;
  std::vector<std::int64_t> summed;  // elements of each sum
};

const auto kGoesOn = [] { return false; };

// Three parameters of 16 elements, a cache line each, and their flags; two buffers.
class ReplicaSumTest : public testing::Test {
 protected:
  static constexpr std::int64_t kNumel = 16;

  ReplicaSumTest() : packing_({at::ones({kNumel}), at::ones({kNumel}), at::ones({kNumel})}) {
    std::vector<at::Tensor> buffers;
    for (int i = 0; i < 2; ++i) {
      buffers.push_back(packing_.allocate(at::kFloat, GradAccumulator::num_flags(packing_, true)));
    }
    gradients_.push_back(std::make_unique<GradAccumulator>(
        packing_, std::vector<std::string>{"a", "b", "c"}, buffers));
  }

  ReplicaSum sum(std::int64_t bucket_bytes) {
    return {c10::intrusive_ptr<c10d::ProcessGroup>(group_), bucket_bytes, gradients_};
  }

  void begin_batch() { gradients_[0]->begin_batch(1); }
  void microbatch(ReplicaSum& sum, bool is_last, const std::vector<std::size_t>& parameters) {
    sum.begin_microbatch(1, is_last);
    for (const std::size_t parameter : parameters) {
      gradients_[0]->add(parameter, at::full({kNumel}, 1.0));
    }
  }
  float value(std::size_t parameter) const {
    return gradients_[0]->view(1, parameter).max().item<float>();
  }

  FlatPacking packing_;
  std::vector<std::unique_ptr<GradAccumulator>> gradients_;
  c10::intrusive_ptr<Alike> group_ = c10::make_intrusive<Alike>();
};

TEST_F(ReplicaSumTest, OneBucketIsSummedWithItsFlagsAtTheEnd) {
  ReplicaSum sum = this->sum(1 << 20);
  begin_batch();
  microbatch(sum, false, {2, 1, 0});
  microbatch(sum, true, {2, 1, 0});
  EXPECT_TRUE(group_->summed.empty());
  sum.end_batch(1);
  EXPECT_EQ(group_->summed, (std::vector<std::int64_t>{3 * kNumel + 3}));
  EXPECT_EQ(value(0), 4);
}

TEST_F(ReplicaSumTest, BucketsBeginInTheLastMicrobatchFromTheLastParameterOn) {
  ReplicaSum sum = this->sum(1);
  begin_batch();
  microbatch(sum, false, {2, 1, 0});
  EXPECT_TRUE(group_->summed.empty());
  microbatch(sum, true, {1});
  EXPECT_TRUE(group_->summed.empty()) << "parameter 2 comes first on every replica";
  gradients_[0]->add(2, at::full({kNumel}, 1.0));
  EXPECT_EQ(group_->summed.size(), 2u);
  gradients_[0]->add(0, at::full({kNumel}, 1.0));
  EXPECT_EQ(group_->summed.size(), 3u);
  EXPECT_EQ(sum.end_batch(1).works.size(), 4u);
  EXPECT_EQ(group_->summed, (std::vector<std::int64_t>{kNumel, kNumel, kNumel, 3}));
  for (std::size_t parameter = 0; parameter < 3; ++parameter) {
    EXPECT_EQ(value(parameter), 4);
  }
}

TEST_F(ReplicaSumTest, AGradientThatDoesNotComeChangesNoOrder) {
  ReplicaSum sum = this->sum(1);
  begin_batch();
  microbatch(sum, false, {2, 1, 0});
  microbatch(sum, true, {1, 0});
  EXPECT_TRUE(group_->summed.empty());
  sum.end_batch(1);
  EXPECT_EQ(group_->summed, (std::vector<std::int64_t>{kNumel, kNumel, kNumel, 3}));
  EXPECT_EQ(value(2), 2);
}

TEST_F(ReplicaSumTest, AGradientThatComesInPartsIsWaitedFor) {
  ReplicaSum sum = this->sum(1);
  begin_batch();
  microbatch(sum, false, {2, 2, 1, 0});
  microbatch(sum, true, {2});
  EXPECT_TRUE(group_->summed.empty());
  gradients_[0]->add(2, at::full({kNumel}, 1.0));
  EXPECT_EQ(group_->summed.size(), 1u);
  EXPECT_EQ(value(2), 8);
}

TEST_F(ReplicaSumTest, AGradientThatComesTooLateIsRefused) {
  ReplicaSum sum = this->sum(1);
  begin_batch();
  microbatch(sum, false, {2, 1, 0});
  microbatch(sum, true, {2});
  EXPECT_THROW(gradients_[0]->add(2, at::full({kNumel}, 1.0)), ValueError);
}

TEST_F(ReplicaSumTest, WhatIsSettledIsSummedOnce) {
  ReplicaSum sum = this->sum(1);
  begin_batch();
  microbatch(sum, false, {2, 1});
  sum.settle(kGoesOn);  // incomplete: nothing to wait for
  EXPECT_TRUE(group_->summed.empty());
  microbatch(sum, true, {2, 1});
  sum.settle(kGoesOn);
  EXPECT_TRUE(sum.end_batch(1).is_settled);
  EXPECT_EQ(group_->summed.size(), 4u);
  EXPECT_EQ(value(2), 4);
  EXPECT_FALSE(gradients_[0]->has_gradient(1)[0]);
}

TEST_F(ReplicaSumTest, AFailureElsewhereEndsSettling) {
  ReplicaSum sum = this->sum(1);
  begin_batch();
  group_->is_lost = true;
  microbatch(sum, true, {2, 1, 0});
  int times_asked = 0;
  EXPECT_THROW(sum.settle([&] { return ++times_asked == 2; }), ChannelAborted);
  EXPECT_EQ(times_asked, 2);
}

TEST_F(ReplicaSumTest, WithOneBucketNobodyListensForGradients) {
  int heard = 0;
  gradients_[0]->on_added([&](std::size_t) { ++heard; });
  ReplicaSum one = this->sum(1 << 20);
  begin_batch();
  microbatch(one, true, {2, 1, 0});
  EXPECT_EQ(heard, 3);
  ReplicaSum several = this->sum(1);
  microbatch(several, false, {2, 1, 0});
  EXPECT_EQ(heard, 3);
}

}  // namespace
}  // namespace pd2
