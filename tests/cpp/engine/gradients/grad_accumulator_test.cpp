#include "engine/gradients/grad_accumulator.h"

#include "core/check.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

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

TEST(GradAccumulatorDtypeTest, NarrowGradientsAreRoundedAfterEachSum) {
  EXPECT_EQ(GradAccumulator::dtype(at::kBFloat16, at::kBFloat16), at::kBFloat16);
  EXPECT_EQ(GradAccumulator::dtype(at::kHalf, at::kBFloat16), at::kFloat);
  EXPECT_EQ(GradAccumulator::dtype(at::kFloat, at::kBFloat16), at::kFloat);
  const FlatPacking packing({at::ones({4}, at::kBFloat16)});
  GradAccumulator gradients(packing, {"a"}, {packing.allocate(at::kBFloat16)});
  const at::Tensor parameter = at::ones({4}, at::kBFloat16).requires_grad_();
  gradients.attach(0, parameter);
  gradients.begin_batch(0);
  (parameter * 256).sum().backward();
  for (int i = 0; i < 3; ++i) {
    parameter.sum().backward();  // 257 is half way to 258, and goes to the even one
  }
  EXPECT_EQ(gradients.view(0, 0)[0].item<float>(), 256);
  (parameter * 3).sum().backward();
  EXPECT_EQ(gradients.view(0, 0)[0].item<float>(), 260);
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

// The same gradients at once and in groups: several uses of a parameter, several backwards, some
// without a gradient, and one that fails.
TEST_F(GradAccumulatorTest, GroupsGiveTheSameBitsAndAreAddedByTheEndOfTheBackward) {
  std::vector<std::vector<at::Tensor>> sums;
  for (const std::size_t bytes :
       {std::size_t{0}, std::size_t{1}, std::size_t{13}, std::size_t{1000}}) {
    gradients_.add_in_groups(bytes);
    gradients_.begin_batch(0);
    std::vector<std::size_t> added;
    gradients_.on_added([&](std::size_t parameter) { added.push_back(parameter); });
    for (int microbatch = 1; microbatch <= 3; ++microbatch) {
      const at::Tensor factor = at::tensor({0.1F, 0.7F, 1e-8F}) / microbatch;
      at::Tensor loss = (parameters_[0] * factor).sum();
      if (microbatch != 1) {
        loss = loss + (parameters_[1] * 0.3 / microbatch).exp().sum();
      }
      added.clear();
      loss.backward();
      EXPECT_EQ(added.size(), microbatch == 1 ? 1U : 2U);
      EXPECT_EQ(gradients_.has_gradient(0)[1], microbatch != 1);
    }
    sums.push_back({gradients_.view(0, 0).clone(), gradients_.view(0, 1).clone()});
    EXPECT_TRUE(sums.back()[0].equal(sums.front()[0])) << bytes;
    EXPECT_TRUE(sums.back()[1].equal(sums.front()[1])) << bytes;
    EXPECT_GT(sums.back()[1].abs().sum().item<float>(), 0);
  }
}

TEST_F(GradAccumulatorTest, AGroupHasNoParameterTwice) {
  gradients_.add_in_groups(1000);
  gradients_.begin_batch(0);
  const at::Tensor other_slot = at::ones({3}).requires_grad_();
  gradients_.attach(0, other_slot);
  (parameters_[0] * 2 + other_slot * 5).sum().backward();
  EXPECT_EQ(gradients_.view(0, 0).sum().item<float>(), 21);
}

TEST_F(GradAccumulatorTest, WhatAFailedBackwardLeftIsForgottenByTheNextBatch) {
  gradients_.add_in_groups(1000);
  gradients_.begin_batch(0);
  at::Tensor between = parameters_[0] * 1;
  between.register_hook([](const at::Tensor& gradient) -> at::Tensor {
    throw std::runtime_error("the user's hook");
    return gradient;
  });
  // The last operators' gradients come first.
  EXPECT_THROW((between.sum() + (parameters_[1] * 7).sum()).backward(), std::runtime_error);
  gradients_.begin_batch(0);
  EXPECT_EQ(gradients_.has_gradient(0), (std::vector<bool>{false, false}));
  (parameters_[0] * 2).sum().backward();
  EXPECT_EQ(gradients_.has_gradient(0), (std::vector<bool>{true, false}));
  EXPECT_EQ(gradients_.view(0, 0).sum().item<float>(), 6);
}

}  // namespace
}  // namespace pd2
