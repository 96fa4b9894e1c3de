#include "engine/gradients/grad_accumulator.h"

#include "core/check.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

namespace pd2 {
namespace {

class GradAccumulatorTest : public ::testing::Test {
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
  gradients_.move(2, 0, 1);
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

// Leaves what the last operators' gradients are, which come first.
void run_failing_backward(const at::Tensor& weight, const at::Tensor& behind) {
  const at::Tensor between = weight * 1;
  between.register_hook([](const at::Tensor& gradient) -> at::Tensor {
    throw std::runtime_error("the user's hook");
    return gradient;
  });
  EXPECT_THROW((between.sum() + (behind * 7).sum()).backward(), std::runtime_error);
}

TEST_F(GradAccumulatorTest, WhatAFailedBackwardLeftIsForgottenWithTheStateOfBefore) {
  gradients_.add_in_groups(1000);
  gradients_.begin_batch(0);
  (parameters_[1] * 2).sum().backward();
  const auto before = gradients_.state();
  run_failing_backward(parameters_[0], parameters_[1]);
  gradients_.set_added(before.second);
  (parameters_[0].sum() + (parameters_[1] * 3).sum()).backward();
  EXPECT_EQ(gradients_.view(0, 0).sum().item<float>(), 3);
  EXPECT_EQ(gradients_.view(0, 1).sum().item<float>(), 10);
}

TEST_F(GradAccumulatorTest, WhatAFailedBackwardLeftIsForgottenByTheNextBatch) {
  gradients_.add_in_groups(1000);
  gradients_.begin_batch(0);
  run_failing_backward(parameters_[0], parameters_[1]);
  gradients_.begin_batch(0);
  EXPECT_EQ(gradients_.has_gradient(0), (std::vector<bool>{false, false}));
  (parameters_[0] * 2).sum().backward();
  EXPECT_EQ(gradients_.has_gradient(0), (std::vector<bool>{true, false}));
  EXPECT_EQ(gradients_.view(0, 0).sum().item<float>(), 6);
}

// Calls of operators on lists of tensors, and those whose lists differ in dtype, sizes or strides:
// devices make a launch for each tensor of these.
struct ListCalls {
  int num_added = 0, num_copied = 0, num_single = 0, num_unlike = 0;
};
thread_local ListCalls* list_calls = nullptr;

void see_lists(const at::RecordFunction& call) {
  const std::string name = call.name();
  list_calls->num_single += name == "aten::add_" ? 1 : 0;
  if (name != "aten::_foreach_add_" && name != "aten::_foreach_copy_") {
    return;
  }
  const bool is_copy = name == "aten::_foreach_copy_";
  (is_copy ? list_calls->num_copied : list_calls->num_added) += 1;
  const auto to = call.inputs()[0].toTensorVector(), from = call.inputs()[1].toTensorVector();
  for (std::size_t i = 0; i < to.size(); ++i) {
    const bool is_alike = to[i].scalar_type() == to[0].scalar_type() &&
                          from[i].scalar_type() == (is_copy ? from[0] : to[0]).scalar_type() &&
                          to[i].sizes() == from[i].sizes() && to[i].strides() == from[i].strides();
    list_calls->num_unlike += is_alike ? 0 : 1;
  }
}

// Gradients of 16 bits with several strides, added to float32 at once, and in groups.
class LiftedGroupTest : public testing::Test {
 protected:
  LiftedGroupTest() {
    at::manual_seed(3);
    const at::Tensor image = at::randn({2, 3, 4, 4}, at::kBFloat16);
    parameters_ = {at::randn({5, 7}, at::kBFloat16), at::randn({9}, at::kBFloat16),
                   image.contiguous(at::MemoryFormat::ChannelsLast),
                   at::randn({300}, at::kBFloat16), at::randn({6, 4}, at::kBFloat16).t()};
    for (const at::Tensor& parameter : parameters_) {
      parameter.requires_grad_();
    }
  }

  // Returns the sums of three microbatches.
  std::vector<at::Tensor> train(std::int64_t group_bytes) {
    const FlatPacking packing(parameters_);
    GradAccumulator gradients(packing, std::vector<std::string>(parameters_.size(), "p"),
                              {packing.allocate(at::kFloat)});
    gradients.add_in_groups(group_bytes);
    gradients.begin_batch(0);
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      gradients.attach(i, parameters_[i]);
    }
    calls_ = {};
    list_calls = &calls_;
    const auto handle =
        at::addThreadLocalCallback(at::RecordFunctionCallback([](const at::RecordFunction& call) {
                                     see_lists(call);
                                     return std::unique_ptr<at::ObserverContext>();
                                   }).needsInputs(true));
    for (int microbatch = 1; microbatch <= 3; ++microbatch) {
      at::Tensor loss = at::full({}, 0, at::kFloat);
      for (const at::Tensor& parameter : parameters_) {
        loss = loss + (parameter * 0.3 / microbatch).exp().to(at::kFloat).sum();
      }
      // Another layout than its parameter's, which autograd keeps.
      parameters_[0].mutable_grad() = at::zeros({7, 5}, at::kBFloat16).t();
      loss.backward();
    }
    at::removeCallback(handle);
    kept_bytes_ = gradients.most_kept_bytes();
    std::vector<at::Tensor> sums;
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      sums.push_back(gradients.view(0, i).clone());
    }
    return sums;
  }

  std::vector<at::Tensor> parameters_;
  ListCalls calls_;
  std::int64_t kept_bytes_ = 0;
};

TEST_F(LiftedGroupTest, GradientsOf16BitsAreAddedInTheSameLaunchesToTheSameBits) {
  const std::vector<at::Tensor> expected = train(0);
  EXPECT_EQ(calls_.num_added + calls_.num_copied, 0);
  const auto check = [&](std::int64_t group_bytes) {
    const std::vector<at::Tensor> sums = train(group_bytes);
    for (std::size_t i = 0; i < sums.size(); ++i) {
      EXPECT_TRUE(sums[i].equal(expected[i])) << i << " in groups of " << group_bytes;
    }
    EXPECT_EQ(calls_.num_unlike, 0) << group_bytes;
  };
  check(1 << 20);
  // Of each microbatch but the first: made float32, then added. The first is written.
  EXPECT_EQ(calls_.num_copied, 3);
  EXPECT_EQ(calls_.num_added, 2);
  const std::int64_t numel = 35 + 9 + 96 + 300 + 24;
  EXPECT_GE(kept_bytes_, (2 + 4) * numel);
  EXPECT_LE(kept_bytes_, (2 + 4) * numel + 5 * 64) << "pieces begin on 64 bytes";
  for (const std::int64_t group_bytes : {1, 100, 500, 700, 900}) {
    check(group_bytes);
    // No parameter of more is made float32 beside others.
    const std::int64_t largest = 2 * 300;
    EXPECT_LE(kept_bytes_, group_bytes + largest + group_bytes + 5 * 64) << group_bytes;
  }
}

}  // namespace
}  // namespace pd2
