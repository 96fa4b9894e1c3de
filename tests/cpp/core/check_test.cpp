#include "core/check.h"

#include "raises.h"

#include <gtest/gtest.h>

namespace pd2 {
namespace {

TEST(Check, ThrowsAllPartsStreamedTogether) {
  const int m = 2;
  const int d = 4;
  const std::string text = testing::value_error(
      [&] { PD2_CHECK(m >= d, "num_microbatches: ", m, ", num_stages: ", d, ", ", true); });
  EXPECT_EQ(text, "num_microbatches: 2, num_stages: 4, true");
}

TEST(Check, IsAnInvalidArgument) { EXPECT_THROW(PD2_CHECK(false, "no"), std::invalid_argument); }

TEST(Check, EvaluatesThePartsOnlyOnFailure) {
  int evaluated = 0;
  PD2_CHECK(true, ++evaluated);
  EXPECT_EQ(evaluated, 0);
}

TEST(Check, IsOneStatement) {
  bool reached = false;
  if (reached)
    PD2_CHECK(false, "not here");
  else
    reached = true;
  EXPECT_TRUE(reached);
}

TEST(Assert, NamesFileLineAndExpression) {
  const int pins = -1;
  try {
    PD2_ASSERT(pins >= 0, "pins: ", pins);
    FAIL();
  } catch (const std::logic_error& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("check_test.cpp:"), std::string::npos) << text;
    EXPECT_NE(text.find("pins >= 0: pins: -1"), std::string::npos) << text;
    EXPECT_EQ(dynamic_cast<const ValueError*>(&error), nullptr);
  }
}

TEST(Assert, NeedsNoParts) {
  EXPECT_THROW(PD2_ASSERT(1 > 2), std::logic_error);
  EXPECT_NO_THROW(PD2_ASSERT(2 > 1));
}

}  // namespace
}  // namespace pd2
