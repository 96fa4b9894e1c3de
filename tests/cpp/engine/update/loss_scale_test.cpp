#include "engine/update/loss_scale.h"

#include <gtest/gtest.h>

#include <limits>

namespace pd2 {
namespace {

LossScaleOptions options(std::int64_t growth_interval = 2) {
  LossScaleOptions options;
  options.init_scale = 1024;
  options.growth_interval = growth_interval;
  return options;
}

TEST(LossScale, BelongsToAVersion) {
  LossScale scale(options(), 5);
  scale.decide(/*overflow=*/true);
  scale.decide(false);
  scale.decide(false);
  scale.decide(false);
  // Also while later ones have been decided.
  EXPECT_EQ(scale.of_version(5), 1024);
  EXPECT_EQ(scale.of_version(6), 512);
  EXPECT_EQ(scale.of_version(7), 512);
  EXPECT_EQ(scale.of_version(8), 1024);
  EXPECT_EQ(scale.of_version(9), 1024);
  EXPECT_EQ(scale.growth_tracker(), 1);
}

TEST(LossScale, AnOverflowBeginsTheCountAnew) {
  LossScale scale(options(3), 0);
  for (int version = 1; version <= 2; ++version) {
    scale.decide(false);
  }
  EXPECT_EQ(scale.growth_tracker(), 2);
  scale.decide(true);
  EXPECT_EQ(scale.growth_tracker(), 0);
  for (int version = 4; version <= 5; ++version) {
    scale.decide(false);
  }
  EXPECT_EQ(scale.of_version(5), 512);
  scale.decide(false);
  EXPECT_EQ(scale.of_version(6), 1024);
}

TEST(LossScale, NeverGrowsToInfinity) {
  LossScale scale(options(1), 0);
  scale.set(4, std::numeric_limits<float>::max(), 0);
  scale.decide(false);
  EXPECT_EQ(scale.of_version(5), std::numeric_limits<float>::max());
}

TEST(LossScale, GoesOnFromWhatWasLoaded) {
  LossScale scale(options(), 0);
  scale.decide(true);
  scale.set(1, 64, 1);
  EXPECT_EQ(scale.of_version(1), 64);
  scale.decide(false);
  EXPECT_EQ(scale.of_version(2), 128);
}

}  // namespace
}  // namespace pd2
