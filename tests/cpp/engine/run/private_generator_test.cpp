#include "engine/run/private_generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/multinomial.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/randperm.h>
#include <ATen/ops/rrelu.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
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
      {"rrelu", [x] { return at::rrelu(-x, 0.1, 0.3, true); }},
      {"attention",
       [q] { return at::scaled_dot_product_attention(q, q, q, std::nullopt, 0.5, false); }},
  };
}

TEST(PrivateGeneratorTest, WhatDrawsDrawsTheSameNumbersAgainAndNobodyElsesChange) {
  for (const auto& [name, draw] : operators()) {
    SCOPED_TRACE(name);
    const at::Tensor before = default_state();
    const auto with = [&](std::uint64_t seed) {
      const PrivateGenerator generator(seed);
      return draw();
    };
    const at::Tensor first = with(1);
    EXPECT_TRUE(with(1).equal(first));
    EXPECT_TRUE(default_state().equal(before));
    EXPECT_FALSE(with(2).equal(first));
    draw();
    EXPECT_FALSE(default_state().equal(before));
  }
}

TEST(PrivateGeneratorTest, AGeneratorOfOnesOwnIsRefused) {
  at::Generator given = at::detail::createCPUGenerator(7);
  const PrivateGenerator generator(1);
  EXPECT_THROW(at::ones({9}).normal_(0, 1, given), std::exception);
}

TEST(PrivateGeneratorTest, AForwardsSeedsFollowFromItsOwn) {
  const auto three = [](std::uint64_t seed) {
    const ForwardSeeds seeds(seed);
    return std::set<std::uint64_t>{next_seed(), next_seed(), next_seed()};
  };
  EXPECT_EQ(three(5).size(), 3u);
  EXPECT_EQ(three(5), three(5));
  EXPECT_NE(three(5), three(6));
  EXPECT_THROW(next_seed(), std::exception);
}

TEST(PrivateGeneratorTest, OtherThreadsDrawAsEver) {
  const PrivateGenerator generator(1);
  const at::Tensor before = default_state();
  std::thread([] { at::rand({3}); }).join();
  EXPECT_FALSE(default_state().equal(before));
}

TEST(PrivateGeneratorTest, WithoutASeedDrawingIsAnErrorUntilTheEnd) {
  const PrivateGenerator outer(1);
  const at::Tensor first = at::rand({3});
  {
    const PrivateGenerator forbidden(std::nullopt);
    EXPECT_THROW(at::rand({3}), std::exception);
    EXPECT_EQ((at::ones({3}) + 1).sum().item<float>(), 6);
  }
  EXPECT_FALSE(at::rand({3}).equal(first));
}

TEST(PrivateGeneratorTest, SeedsFollowTheDefaultGenerator) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  generator.set_current_seed(3);
  const auto first = draw_seed(), second = draw_seed();
  EXPECT_NE(first, second);
  generator.set_current_seed(3);
  EXPECT_EQ(draw_seed(), first);
}

}  // namespace
}  // namespace pd2
