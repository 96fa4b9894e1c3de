#include "engine/stage/stage.h"

#include "core/check.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

namespace pd2 {
namespace {

// A stage of one parameter, trained by plain SGD with learning rate 1: W(t + 1) = W(t) - gradient.
class StageTest : public ::testing::Test {
 protected:
  void make(int num_versions, at::ScalarType dtype = at::kFloat) {
    stage_.emplace(std::vector<at::Tensor>{at::full({3}, 100, dtype)},
                   std::vector<std::string>{"w"}, StageOptions{.num_versions = num_versions});
    for (int slot = 0; slot < stage_->slots().num_slots(); ++slot) {
      weights_.push_back(stage_->slots().weight(slot, 0).detach().requires_grad_());
      stage_->attach(0, weights_.back());
    }
    if (dtype == at::kFloat) {
      stage_->step_place().set_optimizers({{OptimizerKind::kSgd, {0}}});
    }
  }
  void backward(std::int64_t batch, double gradient) {
    stage_->begin_batch(batch);
    (weights_.front() * gradient).sum().backward();
  }
  void step() {
    GroupOptions options;
    options.sgd.lr = 1;
    const std::vector<GroupOptions> groups{options};
    stage_->write_next(groups);
  }
  double newest() const {
    const WeightStore& versions = stage_->versions();
    return stage_->slots().weight(versions.slot(versions.newest()), 0)[0].item<double>();
  }

  std::optional<Stage> stage_;
  std::vector<at::Tensor> weights_;
};

TEST_F(StageTest, TheNextBatchsGradientsMayComeWhileTheStepIsUnderWay) {
  make(2);
  EXPECT_TRUE(stage_->slots().has_slack());
  EXPECT_TRUE(stage_->slots().rotates());
  EXPECT_EQ(stage_->slots().num_slots(), 3);
  double expected = 100;
  backward(0, 1);
  for (int batch = 0; batch < 7; ++batch) {
    stage_->versions().pin(batch);  // the next batch's microbatches read it
    stage_->begin_update(batch);
    backward(batch + 1, batch + 2);
    EXPECT_EQ(stage_->gradients().gradient(0)[0].item<double>(), batch + 1);
    step();
    EXPECT_EQ(newest(), expected);
    stage_->publish();
    expected -= batch + 1;
    EXPECT_EQ(newest(), expected);
    stage_->versions().unpin(batch);
  }
}

TEST_F(StageTest, LargeWeightsHaveTheirOwnState) {
  constexpr std::int64_t kNumel = 1 << 20;
  Stage stage({at::ones({3}), at::ones({kNumel})}, {"small", "large"}, {.num_versions = 2});
  stage.step_place().set_optimizers({{OptimizerKind::kAdam, {0, 0}}});
  for (std::size_t parameter = 0; parameter < 2; ++parameter) {
    const at::Tensor weight = stage.slots().weight(0, parameter);
    stage.step_place().set_state("exp_avg", parameter, at::full_like(weight, 1.0 + parameter));
  }
  EXPECT_EQ(stage.step_place().state("exp_avg", 0).sum().item<float>(), 3);
  EXPECT_EQ(stage.step_place().state("exp_avg", 1).sum().item<float>(), 2 * kNumel);
  EXPECT_EQ(stage.slots().weight(0, 1).sum().item<float>(), kNumel);
}

TEST_F(StageTest, LoadedMomentumIsNotBegunAnew) {
  Stage stage({at::ones({3}), at::ones({3})}, {"stepped", "loaded"}, {});
  stage.step_place().set_optimizers({{OptimizerKind::kSgd, {0, 0}}});
  GroupOptions options;
  options.sgd.lr = options.sgd.momentum = 1;
  const std::vector<GroupOptions> groups{options};
  for (std::size_t parameter = 0; parameter < 2; ++parameter) {
    const at::Tensor weight = stage.slots().weight(0, parameter).detach().requires_grad_();
    stage.attach(parameter, weight);
    stage.begin_batch(static_cast<std::int64_t>(parameter));
    weight.sum().backward();
    stage.begin_update(static_cast<std::int64_t>(parameter));
    stage.write_next(groups);
    stage.publish();
    stage.step_place().set_state("momentum_buffer", 1, at::full({3}, 5.0));
    stage.step_place().set_step_count(1, 1);
  }
  EXPECT_EQ(stage.slots().weight(0, 0)[0].item<float>(), 0);
  EXPECT_EQ(stage.slots().weight(0, 1)[0].item<float>(), 1 - (5 + 1));
}

TEST_F(StageTest, GradientsMayNotComeWhereWeightsAreRead) {
  make(2);
  backward(0, 1);
  stage_->versions().pin(0);
  stage_->begin_update(0);
  step();
  stage_->publish();
  stage_->begin_batch(1);
  EXPECT_THROW(stage_->begin_batch(2), ValueError);  // where W(0) is
}

TEST_F(StageTest, RotationTakesNoMemoryBeyondVersionsAndGradients) {
  make(2);
  EXPECT_EQ(stage_->bytes().weights, 2 * 3 * 4);
  EXPECT_EQ(stage_->bytes().gradients, 3 * 4);
}

TEST_F(StageTest, WithTwoGradientsTheNextBatchsMayComeBesideAStepOnACopy) {
  make(2);
  stage_->step_place().set_optimizers({});
  stage_->arrange(/*reads_first=*/false, /*waits=*/true);
  double expected = 100;
  backward(0, 1);
  for (int batch = 0; batch < 5; ++batch) {
    stage_->begin_update(batch);
    const int to = stage_->write_next({});
    backward(batch + 1, batch + 2);
    EXPECT_EQ(stage_->gradients().gradient(0)[0].item<double>(), batch + 1);
    stage_->slots().weight(to, 0).sub_(stage_->gradients().gradient(0));
    stage_->publish();
    expected -= batch + 1;
    EXPECT_EQ(newest(), expected);
  }
}

TEST_F(StageTest, OneVersionIsSteppedInPlace) {
  make(1);
  EXPECT_FALSE(stage_->slots().has_slack());
  EXPECT_FALSE(stage_->slots().rotates());
  EXPECT_EQ(stage_->slots().num_slots(), 1);
  backward(0, 5);
  stage_->begin_update(0);
  step();
  stage_->publish();
  EXPECT_EQ(newest(), 95);
}

TEST_F(StageTest, HalfPrecisionWeightsDoNotRotateWithTheirFloat32Gradients) {
  make(2, at::kBFloat16);
  EXPECT_TRUE(stage_->slots().has_slack());
  EXPECT_FALSE(stage_->slots().rotates());
  EXPECT_EQ(stage_->slots().num_slots(), 2);
  EXPECT_EQ(stage_->bytes().gradients, 3 * 4);
}

// It may change with the optimizer, at any version, with a batch complete.
TEST_F(StageTest, WeightsAndGradientsSurviveAnotherArrangement) {
  for (int before = 0; before < 6; ++before) {
    weights_.clear();
    make(2);
    double expected = 100;
    for (int batch = 0; batch < before + 9; ++batch) {
      backward(batch, batch + 1);
      if (batch >= before) {
        const bool rotates = (batch - before) % 2 == 1, waits = (batch - before) % 4 < 2;
        stage_->arrange(rotates, waits);
        EXPECT_EQ(stage_->slots().rotates(), rotates);
        EXPECT_EQ(stage_->overlaps(), rotates || waits);
        EXPECT_EQ(stage_->bytes().gradients, (waits && !rotates ? 2 : 1) * 3 * 4);
        EXPECT_EQ(newest(), expected);
      }
      stage_->begin_update(batch);
      if (stage_->slots().rotates()) {
        step();
      } else {
        stage_->step_place().set_optimizers({});
        const int to = stage_->write_next({});
        stage_->slots().weight(to, 0).sub_(stage_->gradients().gradient(0));
        stage_->step_place().set_optimizers({{OptimizerKind::kSgd, {0}}});
      }
      stage_->publish();
      expected -= batch + 1;
      EXPECT_EQ(newest(), expected);
    }
  }
}

}  // namespace
}  // namespace pd2
