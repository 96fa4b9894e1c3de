#include "engine/gradients/copy_sum.h"

#include <ATen/ops/full.h>
#include <ATen/ops/rand.h>
#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace pd2 {
namespace {

TEST(CopySum, TheSecondToComeEndsTheWorkOfBoth) {
  CopySum sum;
  const at::Tensor mine = at::full({2}, 1.0), theirs = at::full({2}, 10.0);
  const auto first = sum.add(0, 0, mine);
  EXPECT_FALSE(first->isCompleted());
  EXPECT_EQ(mine[0].item<double>(), 1);
  const auto second = sum.add(1, 0, theirs);
  EXPECT_TRUE(first->isCompleted());
  EXPECT_TRUE(second->isCompleted());
  EXPECT_TRUE(mine.equal(at::full({2}, 11.0)));
  EXPECT_TRUE(theirs.equal(mine));
}

TEST(CopySum, ItIsPipelineZeroPlusPipelineOneWhoeverComesFirst) {
  const at::Tensor zero = at::rand({1000}), one = at::rand({1000});
  for (const int first : {0, 1}) {
    CopySum sum;
    std::vector<at::Tensor> flat = {zero.clone(), one.clone()};
    sum.add(first, 0, flat[first]);
    sum.add(1 - first, 0, flat[1 - first]);
    EXPECT_TRUE(flat[0].equal(zero + one));
    EXPECT_TRUE(flat[1].equal(flat[0]));
  }
}

TEST(CopySum, BuffersAreAddedApart) {
  CopySum sum;
  std::vector<at::Tensor> flat;
  for (const double value : {1.0, 2.0, 10.0, 20.0}) {
    flat.push_back(at::full({1}, value));
  }
  const auto a = sum.add(0, 0, flat[0]), b = sum.add(0, 1, flat[1]);
  sum.add(1, 1, flat[3]);
  EXPECT_FALSE(a->isCompleted());
  EXPECT_TRUE(b->isCompleted());
  sum.add(1, 0, flat[2]);
  EXPECT_EQ(flat[0].item<double>(), 11);
  EXPECT_EQ(flat[3].item<double>(), 22);
}

TEST(CopySum, TwoThreadsMeetInEveryBatch) {
  CopySum sum;
  // The thread sanitizer does not see Work::wait() give its lock back while it waits, and knows no
  // more than 64 locks that a thread holds.
  constexpr int kBatches = 50;
  std::vector<double> last(2);
  const auto run = [&](int copy) {
    const at::Tensor flat = at::full({1}, copy + 1.0);
    for (int batch = 0; batch < kBatches; ++batch) {
      flat.fill_(copy + batch);
      sum.add(copy, 0, flat)->wait();
      ASSERT_EQ(flat.item<double>(), 2 * batch + 1);
    }
    last[copy] = flat.item<double>();
  };
  std::thread other(run, 1);
  run(0);
  other.join();
  EXPECT_EQ(last[0], last[1]);
}

}  // namespace
}  // namespace pd2
