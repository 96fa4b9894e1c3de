#include "planner/simulate/fastest_v.h"

#include <gtest/gtest.h>

namespace pd2 {
namespace {

// In the order of the memory that they need: which is to be taken.
TEST(FastestV, FewestActivationsOfThoseWithinAThousandthOfTheShortest) {
  EXPECT_EQ(first_of_fastest({1.0015, 1.0009, 1.0}), 1u);
  EXPECT_EQ(first_of_fastest({1.0018, 1.0011, 1.0003, 1.0}), 2u);
  EXPECT_EQ(first_of_fastest({1.0005, 1.0}), 0u);
  EXPECT_EQ(first_of_fastest({1.0, 1.0, 0.9}), 2u);
  EXPECT_EQ(first_of_fastest({1.0}), 0u);
}

}  // namespace
}  // namespace pd2
