#include "engine/stage/host_mirror.h"

#include "engine/stage/stage.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <chrono>

namespace pd2 {
namespace {

using std::chrono_literals::operator""ms;

constexpr std::int64_t kNumel = 16;  // a cache line

// Three parameters of a bucket each.
class HostMirrorTest : public ::testing::Test {
 protected:
  HostMirrorTest() : packing_({at::ones({kNumel}), at::ones({kNumel}), at::ones({kNumel})}) {
    gradients_.push_back(std::make_unique<GradAccumulator>(
        packing_, std::vector<std::string>{"a", "b", "c"},
        std::vector{packing_.allocate(at::kFloat), packing_.allocate(at::kFloat)}));
    mirror_ = std::make_unique<HostMirror>(streams_, gradients_, /*bucket_bytes=*/1,
                                           /*fetches_early=*/true);
  }

  void microbatch(bool is_last, const std::vector<std::size_t>& parameters) {
    mirror_->begin_microbatch(1, is_last);
    for (const std::size_t parameter : parameters) {
      gradients_[0]->add(parameter, at::full({kNumel}, 1.0));
    }
  }
  // What has come to the host.
  float fetched(std::size_t parameter) const {
    return packing_.view(mirror_->gradients(0), parameter).max().item<float>();
  }

  const StageStreams streams_{at::kCPU};
  FlatPacking packing_;
  std::vector<std::unique_ptr<GradAccumulator>> gradients_;
  std::unique_ptr<HostMirror> mirror_;
};

TEST_F(HostMirrorTest, GradientsAreFetchedAsSoonAsTheLastMicrobatchHasGivenThem) {
  gradients_[0]->begin_batch(1);
  microbatch(false, {2, 1, 0});
  EXPECT_EQ(fetched(2), 0);
  microbatch(true, {2, 1});
  EXPECT_EQ(fetched(2), 2);
  EXPECT_EQ(fetched(1), 2);
  EXPECT_EQ(fetched(0), 0) << "its last gradient has not come";
  gradients_[0]->add(0, at::full({kNumel}, 1.0));
  EXPECT_EQ(fetched(0), 2);
}

TEST_F(HostMirrorTest, GradientsOfABackwardThatIsRunAgainCountOnce) {
  EXPECT_TRUE(mirror_->fetches_early());
  gradients_[0]->begin_batch(1);
  microbatch(false, {2, 1});
  mirror_->forget_microbatch();
  for (const std::size_t parameter : {2, 1, 0}) {
    gradients_[0]->add(parameter, at::full({kNumel}, 1.0));
  }
  microbatch(true, {2});
  EXPECT_EQ(fetched(2), 3);
}

TEST_F(HostMirrorTest, GradientsWaitOnTheDeviceWhileThoseBeforeAreBeingStepped) {
  gradients_[0]->begin_batch(1);
  microbatch(false, {2, 1, 0});
  microbatch(true, {2, 1, 0});
  mirror_->begin_update(/*sums=*/false);
  mirror_->fetch_rest(1);
  gradients_[0]->begin_batch(0);
  mirror_->begin_microbatch(0, true);
  for (const std::size_t parameter : {2, 1, 0}) {
    gradients_[0]->add(parameter, at::full({kNumel}, 5.0));
  }
  EXPECT_EQ(fetched(2), 2);
  EXPECT_TRUE(mirror_->has_gradient(0)[2]);
  mirror_->end_update();
  mirror_->begin_update(/*sums=*/false);
  mirror_->fetch_rest(0);
  for (const std::size_t parameter : {2, 1, 0}) {
    EXPECT_EQ(fetched(parameter), 5);
  }
}

TEST_F(HostMirrorTest, TheBufferIsFreeOnceItsSumsHaveBeenFetched) {
  EXPECT_TRUE(mirror_->wait_until_released(0ms, {}));
  mirror_->begin_update(/*sums=*/true);
  EXPECT_FALSE(mirror_->wait_until_released(0ms, {}));
  mirror_->fetch_rest(1);
  EXPECT_TRUE(mirror_->wait_until_released(0ms, {}));
}

TEST_F(HostMirrorTest, WhatTheUserWroteReplacesMastersAndNothingElseDoes) {
  const FlatPacking halves({at::ones({kNumel}, at::kBFloat16), at::ones({kNumel}, at::kBFloat16)});
  std::vector<std::unique_ptr<GradAccumulator>> gradients;
  gradients.push_back(std::make_unique<GradAccumulator>(halves, std::vector<std::string>{"a", "b"},
                                                        std::vector{halves.allocate(at::kFloat)}));
  HostMirror mirror(streams_, gradients, 1, true);
  const at::Tensor weights = halves.allocate(at::kBFloat16), master = halves.allocate(at::kFloat);
  master.fill_(1.001);
  weights.copy_(master);
  mirror.take_weights(0, weights);
  mirror.show();
  weights.view(-1)[3] = 2.0;
  mirror.take_changes({weights}, {master});
  EXPECT_EQ(master[3].item<float>(), 2.0F);
  EXPECT_EQ(master[4].item<float>(), 1.001F);
  weights.view(-1)[4] = 2.0;  // not by the user
  mirror.take_changes({weights}, {master});
  EXPECT_EQ(master[4].item<float>(), 1.001F);
}

TEST(StageOnHost, AnUpdateNeedsTheGradientBufferNoLonger) {
  Stage stage({at::ones({kNumel})}, {"w"},
              {.num_versions = 2,
               .precision = {.dtypes = {at::kBFloat16}},
               .gradients = {.to_host = true}});
  stage.step_place().set_optimizers({{OptimizerKind::kSgd, {0}}});
  const auto give = [&](std::int64_t batch, float value) {
    stage.begin_batch(batch);
    stage.begin_microbatch(batch, true);
    at::Tensor leaf =
        stage.slots().weight(stage.versions().slot(0), 0).detach().requires_grad_(true);
    stage.attach(0, leaf);
    (leaf * value).sum().backward();
  };
  give(0, 0.5);
  stage.begin_update(0);
  ASSERT_TRUE(stage.overlaps());
  ASSERT_TRUE(stage.wait_for_gradients_buffer(0ms));
  give(1, 8);
  GroupOptions options;
  options.sgd.lr = 1;
  stage.gradients().reduce([] { return false; });
  const int slot = stage.write_next(std::vector{options});
  stage.gradients().end_update();
  stage.publish();
  EXPECT_EQ(stage.slots().weight(slot, 0).max().item<float>(), 0.5F);
  EXPECT_EQ(stage.masters().of(slot, 0).max().item<float>(), 0.5F);
  stage.begin_update(1);
  stage.gradients().reduce([] { return false; });
  EXPECT_EQ(stage.slots().weight(stage.write_next(std::vector{options}), 0).max().item<float>(),
            -7.5F);
}

TEST(StageOnHost, ABackwardThatIsRunAgainPutsNoFetchOff) {
  Stage stage({at::ones({kNumel}), at::ones({kNumel})}, {"v", "w"},
              {.num_versions = 2,
               .precision = {.dtypes = {at::kBFloat16, at::kBFloat16}},
               .gradients = {.bucket_bytes = 1, .to_host = true}});
  EXPECT_TRUE(stage.gradients().begins_early());
  const at::Tensor w =
      stage.slots().weight(stage.versions().slot(0), 1).detach().requires_grad_(true);
  stage.attach(1, w);
  stage.begin_batch(0);
  stage.begin_microbatch(0, false);
  const GradientPath::State before = stage.gradients().state();
  w.sum().backward();
  stage.gradients().set_state(before);
  w.sum().backward();
  stage.begin_microbatch(0, true);
  w.sum().backward();
  EXPECT_THROW(w.sum().backward(), std::exception) << "its gradient has not been fetched";
}

}  // namespace
}  // namespace pd2
