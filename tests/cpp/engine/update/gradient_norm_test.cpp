#include "engine/update/gradient_norm.h"

#include "transport/peer_error.h"

#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <utility>

namespace pd2 {
namespace {

TEST(GradientNorm, ARankThatNeverComesIsATimeout) {
  GradientNormOptions options;
  options.num_parameters = 1;
  std::unique_ptr<SharedBoard> board =
      SharedBoard::create(/*num_ranks=*/2, /*row_size=*/2, std::chrono::milliseconds(300));
  ASSERT_TRUE(board);
  GradientNorm norm(options, std::make_shared<Fault>(), {}, std::move(board));
  // Nothing but the norm's own deadline ends this: no other rank tells a failure.
  EXPECT_THROW(norm.give(/*run=*/0, {{0}, at::ones({1}, at::kDouble)}, [] { return false; }),
               PeerTimeout);
}

}  // namespace
}  // namespace pd2
