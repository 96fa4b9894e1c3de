#include "engine/gradients/tied_sum.h"

#include "engine/channels/channel.h"

#include <ATen/ops/full.h>
#include <ATen/ops/rand.h>
#include <gtest/gtest.h>

#include <atomic>
#include <limits>
#include <thread>
#include <vector>

namespace pd2 {
namespace {

bool never() { return false; }

using Gradients = std::vector<TiedGradient>;

// Every copy in a thread of its own, all in one process.
void add_all(TiedSum& sum, std::int64_t batch, std::vector<Gradients>& copies) {
  std::vector<std::thread> threads;
  for (std::size_t copy = 0; copy < copies.size(); ++copy) {
    threads.emplace_back([&, copy] { sum.add(batch, copy, copies[copy], never); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

TEST(TiedSum, EveryCopyGetsTheSumInTheOrderOfTheStages) {
  TiedSum sum({0, 0, 0}, nullptr);
  for (int batch = 0; batch < 5; ++batch) {
    std::vector<Gradients> copies;
    std::vector<at::Tensor> given;
    for (int copy = 0; copy < 3; ++copy) {
      given.push_back(at::rand({5, 7}));
      copies.push_back({{given.back().clone(), true}});
    }
    add_all(sum, batch, copies);
    for (const Gradients& gradients : copies) {
      EXPECT_TRUE(gradients[0].exists);
      EXPECT_TRUE(gradients[0].gradient.equal((given[0] + given[1]) + given[2]));
    }
  }
}

TEST(TiedSum, WhatHasNoGradientAddsNothing) {
  TiedSum sum({0, 0}, nullptr);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  std::vector<Gradients> copies = {
      {{at::full({2}, 1.0), true}, {at::full({2}, nan), false}, {at::full({2}, nan), false}},
      {{at::full({2}, nan), false}, {at::full({2}, 2.0), true}, {at::full({2}, nan), false}}};
  add_all(sum, 0, copies);
  for (const Gradients& gradients : copies) {
    EXPECT_TRUE(gradients[0].exists && gradients[1].exists);
    EXPECT_FALSE(gradients[2].exists);
    EXPECT_TRUE(gradients[0].gradient.equal(at::full({2}, 1.0)));
    EXPECT_TRUE(gradients[1].gradient.equal(at::full({2}, 2.0)));
  }
}

TEST(TiedSum, LayoutsAndDtypesAreKept) {
  TiedSum sum({0, 0}, nullptr);
  const at::Tensor turned = at::rand({3, 5}).t(), wide = at::rand({3}, at::kDouble);
  const at::Tensor none = at::rand({0, 4});
  std::vector<Gradients> copies;
  for (int copy = 0; copy < 2; ++copy) {
    copies.push_back({{turned.clone(), true}, {none.clone(), true}, {wide.clone(), true}});
  }
  add_all(sum, 0, copies);
  for (const Gradients& gradients : copies) {
    EXPECT_TRUE(gradients[0].gradient.equal(turned + turned));
    EXPECT_EQ(gradients[0].gradient.strides(), turned.strides());
    EXPECT_TRUE(gradients[2].gradient.equal(wide + wide));
  }
}

TEST(TiedSum, OneCopyMayBeABatchAhead) {
  TiedSum sum({0, 0}, nullptr);
  constexpr int kBatches = 50;
  const auto run = [&](std::size_t copy) {
    for (int batch = 0; batch < kBatches; ++batch) {
      Gradients gradients = {{at::full({3}, static_cast<double>(copy + batch)), true}};
      sum.add(batch, copy, gradients, never);
      ASSERT_EQ(gradients[0].gradient[0].item<double>(), 2 * batch + 1);
    }
  };
  std::thread other(run, 1);
  run(0);
  other.join();
}

TEST(TiedSum, WaitingEndsWhenThePipelineIsStopped) {
  TiedSum sum({0, 0}, nullptr);
  std::atomic<bool> stopped = false;
  std::thread waiting([&] {
    Gradients gradients = {{at::full({3}, 1.0), true}};
    EXPECT_THROW(sum.add(0, 0, gradients, [&] { return stopped.load(); }), ChannelAborted);
  });
  stopped = true;
  waiting.join();
}

}  // namespace
}  // namespace pd2
