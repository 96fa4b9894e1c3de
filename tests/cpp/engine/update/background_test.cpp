#include "engine/update/background.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <thread>

namespace pd2 {
namespace {

using namespace std::chrono_literals;

TEST(BackgroundTest, JobsRunInOneThreadOfTheirOwnAfterItsBeginning) {
  std::thread::id began, first, second;
  Background background([&] { began = std::this_thread::get_id(); });
  EXPECT_NE(began, std::thread::id());
  EXPECT_NE(began, std::this_thread::get_id());
  background.start([&] { first = std::this_thread::get_id(); });
  EXPECT_TRUE(background.wait_for(10s));
  background.start([&] { second = std::this_thread::get_id(); });
  EXPECT_TRUE(background.wait_for(10s));
  EXPECT_EQ(first, began);
  EXPECT_EQ(second, began);
}

TEST(BackgroundTest, WaitingEndsWithTheJobOrTheTimeout) {
  Background background([] {});
  EXPECT_TRUE(background.wait_for(0ms));
  std::promise<void> go;
  background.start([&] { go.get_future().wait(); });
  EXPECT_FALSE(background.wait_for(1ms));
  go.set_value();
  EXPECT_TRUE(background.wait_for(10s));
}

TEST(BackgroundTest, WhatAJobHoldsIsGoneWhenItHasEnded) {
  Background background([] {});
  auto held = std::make_shared<int>(1);
  const std::weak_ptr<int> alive = held;
  background.start([held = std::move(held)] {});
  EXPECT_TRUE(background.wait_for(10s));
  EXPECT_TRUE(alive.expired());
}

TEST(BackgroundTest, TheEndWaitsForTheJob) {
  std::atomic<bool> done = false;
  {
    Background background([] {});
    background.start([&] {
      std::this_thread::sleep_for(20ms);
      done = true;
    });
  }
  EXPECT_TRUE(done);
}

}  // namespace
}  // namespace pd2
