#include "engine/run/keyed_random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/multinomial.h>
#include <ATen/ops/native_dropout.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/rand_like.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/randperm.h>
#include <ATen/ops/rrelu.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <thread>

namespace pd2 {
namespace {

at::Tensor default_state() { return at::detail::getDefaultCPUGenerator().get_state(); }

std::map<std::string, std::function<at::Tensor()>> operators() {
  const at::Tensor x = at::ones({6, 8});
  const at::Tensor q = at::ones({1, 1, 6, 8});
  return {
      {"rand", [] { return at::rand({9}); }},
      {"rand_like", [x] { return at::rand_like(x); }},
      {"randn", [] { return at::randn({40}); }},
      {"randint", [] { return at::randint(100, {9}); }},
      {"randperm", [] { return at::randperm(30); }},
      {"bernoulli", [x] { return at::bernoulli(x * 0.5); }},
      {"bernoulli_", [x] { return x.clone().bernoulli_(0.5); }},
      {"normal_", [x] { return x.clone().normal_(); }},
      {"exponential_", [x] { return x.clone().exponential_(); }},
      {"multinomial", [x] { return at::multinomial(x, 4); }},
      {"dropout", [x] { return at::dropout(x, 0.5, true); }},
      {"dropout with history",
       [x] { return at::dropout(x.clone().requires_grad_(), 0.5, true).detach(); }},
      {"native_dropout", [x] { return std::get<0>(at::native_dropout(x, 0.5, true)); }},
      {"rrelu", [x] { return at::rrelu(-x, 0.1, 0.3, true); }},
      {"attention",
       [q] { return at::scaled_dot_product_attention(q, q, q, std::nullopt, 0.5, false); }},
  };
}

TEST(KeyedRandomTest, WhatDrawsDrawsTheSameNumbersAgainAndNobodyElsesChange) {
  for (const auto& [name, draw] : operators()) {
    SCOPED_TRACE(name);
    const at::Tensor before = default_state();
    const auto with = [&](RandomPlace place) {
      const KeyedRandom random(place);
      return draw();
    };
    const at::Tensor first = with({.key = 1});
    EXPECT_TRUE(with({.key = 1}).equal(first));
    EXPECT_TRUE(default_state().equal(before));
    EXPECT_FALSE(with({.key = 2}).equal(first));
    EXPECT_FALSE(with({.key = 1, .number = 1}).equal(first));
    draw();
    EXPECT_FALSE(default_state().equal(before));
  }
}

TEST(KeyedRandomTest, EveryCallOfAnOperatorThatDrawsTakesOneNumber) {
  for (const auto& [name, draw] : operators()) {
    SCOPED_TRACE(name);
    const KeyedRandom random(RandomPlace{.key = 1});
    draw();
    EXPECT_EQ(random_place()->number, 1u);
    const at::Tensor second = draw();
    EXPECT_EQ(random_place()->number, 2u);
    number_draws(1, 1);
    EXPECT_TRUE(draw().equal(second));
  }
}

TEST(KeyedRandomTest, WhatDoesNotDrawTakesNone) {
  const at::Tensor x = at::ones({1, 1, 6, 8});
  const KeyedRandom random(RandomPlace{.key = 1});
  at::dropout(x, 0.5, /*train=*/false);
  at::scaled_dot_product_attention(x, x, x);
  EXPECT_EQ(random_place()->number, 0u);
}

TEST(KeyedRandomTest, DrawsBeyondTheirLayersNumbersTakeNoOtherLayers) {
  RandomPlace layer{.key = 1, .number = 4, .left = 2}, next{.key = 1, .number = 6, .left = 1};
  std::set<std::uint64_t> seeds;
  for (int i = 0; i < 5; ++i) {
    seeds.insert(layer.take());
    seeds.insert(next.take());
  }
  EXPECT_EQ(seeds.size(), 10u);
}

TEST(KeyedRandomTest, APlaceThatIsSetAgainGivesTheSameNumbersUntilTheEnd) {
  const KeyedRandom outer(RandomPlace{.key = 1});
  at::rand({3});
  const std::optional<RandomPlace> place = random_place();
  const at::Tensor first = at::rand({3});
  {
    const KeyedRandom backward(RandomPlace{.key = 7});
    at::rand({3});
    set_random_place(place);
    EXPECT_TRUE(at::rand({3}).equal(first));
  }
  EXPECT_EQ(random_place()->number, 2u);
}

TEST(KeyedRandomTest, AGeneratorOfOnesOwnIsDrawnFromUnlessWhatDrawsIsRepeated) {
  at::Generator given = at::detail::createCPUGenerator(7), same = at::detail::createCPUGenerator(7);
  const at::Tensor want = at::ones({9}).normal_(0, 1, same);
  {
    const KeyedRandom random(RandomPlace{.key = 1});
    EXPECT_TRUE(at::ones({9}).normal_(0, 1, given).equal(want));
    EXPECT_EQ(random_place()->number, 0u);
  }
  const KeyedRandom random(RandomPlace{.key = 1}, {.repeats = true});
  EXPECT_THROW(at::ones({9}).normal_(0, 1, given), std::exception);
}

TEST(KeyedRandomTest, TheDefaultGeneratorByItsNameIsNotOnesOwn) {
  const KeyedRandom random(RandomPlace{.key = 1}, {.repeats = true});
  const at::Tensor want = at::ones({9}).normal_();
  number_draws(0, 1);
  const at::Tensor before = default_state();
  EXPECT_TRUE(at::ones({9}).normal_(0, 1, at::detail::getDefaultCPUGenerator()).equal(want));
  EXPECT_TRUE(default_state().equal(before));
}

TEST(KeyedRandomTest, OtherThreadsDrawAsEver) {
  const KeyedRandom random(RandomPlace{.key = 1});
  EXPECT_TRUE(is_keyed());
  const at::Tensor before = default_state();
  std::thread([] {
    EXPECT_FALSE(is_keyed());
    at::rand({3});
  }).join();
  EXPECT_FALSE(default_state().equal(before));
}

TEST(KeyedRandomTest, OutsideNothingIsNumbered) {
  number_draws(3, 4);
  EXPECT_FALSE(random_place());
  EXPECT_THROW(set_random_place(RandomPlace{}), std::exception);
}

TEST(KeyedRandomTest, SeedsFollowTheDefaultGenerator) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  generator.set_current_seed(3);
  const auto first = draw_seed(), second = draw_seed();
  EXPECT_NE(first, second);
  generator.set_current_seed(3);
  EXPECT_EQ(draw_seed(), first);
}

}  // namespace
}  // namespace pd2
