#include "engine/gradients/grad_accumulator.h"

#include "core/check.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

namespace pd2 {
namespace {

class GradAccumulatorTest : public testing::Test {
 protected:
  GradAccumulatorTest()
      : packing_({at::ones({3}), at::ones({2})}),
        gradients_(packing_, {"a", "b"}, {buffer(), buffer()}) {
    for (std::size_t i = 0; i < 2; ++i) {
      parameters_.push_back(at::ones({i == 0 ? 3 : 2}).requires_grad_());
      gradients_.attach(i, parameters_.back());
    }
  }

  at::Tensor buffer() const {
    return packing_.allocate(at::kFloat, GradAccumulator::num_flags(packing_, true));
  }

  FlatPacking packing_;
  GradAccumulator gradients_;
  std::vector<at::Tensor> parameters_;
};

TEST_F(GradAccumulatorTest, TheFirstMicrobatchWritesAndLaterOnesAdd) {
  gradients_.view(0, 0).fill_(100);  // left by the batch before
  gradients_.begin_batch(0);
  (parameters_[0] * 2).sum().backward();
  EXPECT_EQ(gradients_.view(0, 0).sum().item<float>(), 6);
  (parameters_[0] * 3).sum().backward();
  EXPECT_EQ(gradients_.view(0, 0).sum().item<float>(), 15);
}

TEST_F(GradAccumulatorTest, NoGradientOutlivesItsHook) {
  gradients_.begin_batch(0);
  (parameters_[0] * 2).sum().backward();
  EXPECT_FALSE(parameters_[0].grad().defined());
}

TEST_F(GradAccumulatorTest, EverySlotsParameterFeedsTheSameBuffer) {
  const at::Tensor other_slot = at::ones({3}).requires_grad_();
  gradients_.attach(0, other_slot);
  gradients_.begin_batch(0);
  (parameters_[0] * 2).sum().backward();
  (other_slot * 5).sum().backward();
  EXPECT_EQ(gradients_.view(0, 0).sum().item<float>(), 21);
}

TEST_F(GradAccumulatorTest, AParameterUsedTwiceCountsOnceWithTheSum) {
  gradients_.begin_batch(0);
  (parameters_[0] * 2 + parameters_[0] * 4).sum().backward();
  EXPECT_EQ(gradients_.view(0, 0).sum().item<float>(), 18);
}

TEST_F(GradAccumulatorTest, ParametersWithoutAGradientAreKnown) {
  gradients_.begin_batch(0);
  parameters_[1].sum().backward();
  EXPECT_EQ(gradients_.has_gradient(0), (std::vector<bool>{false, true}));
  gradients_.begin_batch(0);
  EXPECT_EQ(gradients_.has_gradient(0), (std::vector<bool>{false, false}));
}

TEST_F(GradAccumulatorTest, BatchesTakeTurnsBetweenBuffers) {
  gradients_.begin_batch(0);
  (parameters_[0] * 2).sum().backward();
  gradients_.begin_batch(1);
  (parameters_[1] * 5).sum().backward();
  EXPECT_EQ(gradients_.view(0, 0).sum().item<float>(), 6);
  EXPECT_EQ(gradients_.has_gradient(0), (std::vector<bool>{true, false}));
  EXPECT_EQ(gradients_.view(1, 1).sum().item<float>(), 10);
  EXPECT_EQ(gradients_.has_gradient(1), (std::vector<bool>{false, true}));
}

TEST_F(GradAccumulatorTest, WhatHasBeenAddedMovesAndGrowsOn) {
  gradients_.begin_batch(0);
  (parameters_[0] * 2).sum().backward();
  gradients_.move(0, 1);
  (parameters_[0] * 3).sum().backward();
  EXPECT_EQ(gradients_.view(1, 0).sum().item<float>(), 15);
  EXPECT_EQ(gradients_.has_gradient(1), (std::vector<bool>{true, false}));
}

TEST_F(GradAccumulatorTest, AReplicasMissingGradientCountsAsZeroIfAnotherHasOne) {
  gradients_.view(0, 0).fill_(100);
  gradients_.begin_batch(0);
  parameters_[1].sum().backward();
  gradients_.fill_missing(0);
  EXPECT_EQ(gradients_.view(0, 0).sum().item<float>(), 0);
  gradients_.read_flags(0);
  EXPECT_EQ(gradients_.has_gradient(0), (std::vector<bool>{false, true}));
  // What the all-reduce does if another replica has a gradient of the first parameter.
  gradients_.flat(0).slice(0, packing_.numel(), packing_.numel() + 1).fill_(1);
  gradients_.read_flags(0);
  EXPECT_EQ(gradients_.has_gradient(0), (std::vector<bool>{true, true}));
}

TEST(GradAccumulatorDtypeTest, HalfPrecisionGradientsAddUpInFloat32) {
  const FlatPacking packing({at::ones({4}, at::kBFloat16)});
  const at::ScalarType dtype = GradAccumulator::dtype(packing.dtype());
  EXPECT_EQ(dtype, at::kFloat);
  GradAccumulator gradients(packing, {"a"}, {packing.allocate(dtype)});
  const at::Tensor parameter = at::ones({4}, at::kBFloat16).requires_grad_();
  gradients.attach(0, parameter);
  gradients.begin_batch(0);
  (parameter * 256).sum().backward();
  parameter.sum().backward();  // 256 + 1 is no bfloat16
  EXPECT_EQ(gradients.view(0, 0)[0].item<float>(), 257);
}

TEST(GradAccumulatorDtypeTest, ASparseGradientIsRefusedByName) {
  const FlatPacking packing({at::ones({4, 2})});
  GradAccumulator gradients(packing, {"table.weight"}, {packing.allocate(at::kFloat)});
  const at::Tensor table = at::ones({4, 2}).requires_grad_();
  gradients.attach(0, table);
  gradients.begin_batch(0);
  const at::Tensor rows = at::embedding(table, at::tensor({1, 2}, at::kLong), -1, false, true);
  try {
    rows.sum().backward();
    FAIL() << "a sparse gradient was accepted";
  } catch (const std::exception& error) {
    EXPECT_NE(std::string(error.what()).find("table.weight"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace pd2
