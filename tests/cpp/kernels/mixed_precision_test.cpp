// Float32 masters beside 16-bit weights: the passes step them to the bits of the plain passes, and
// round as the definitions say.
#include "kernels/cpu/instruction_set.h"
#include "kernels/cpu/step.h"
#include "kernels/half.h"
#include "kernels/optimizer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace pd2::kernels {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// The number of a bfloat16 or float16, by the formats' definitions.
double value_of(std::uint16_t bits, HalfFormat format) {
  const bool brain = format == HalfFormat::kBfloat16;
  const int mantissa_bits = brain ? 7 : 10;
  const int bias = brain ? 127 : 15;
  const int exponent = (bits & 0x7FFF) >> mantissa_bits;
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  double magnitude = 0;
  if (exponent == (brain ? 255 : 31)) {
    magnitude = mantissa == 0 ? kInf : std::numeric_limits<double>::quiet_NaN();
  } else if (exponent == 0) {
    magnitude = std::ldexp(mantissa, 1 - bias - mantissa_bits);
  } else {
    magnitude = std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
  }
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

// Numbers next to, on and between representable ones, in every exponent; zeros, infinities.
std::vector<float> interesting_numbers() {
  std::vector<float> numbers{0.0F, -0.0F, kInf, -kInf};
  for (int exponent = -149; exponent < 128; ++exponent) {
    for (std::uint32_t mantissa :
         {0x000000U, 0x000001U, 0x000FFFU, 0x001000U, 0x001001U, 0x002FFFU, 0x003000U, 0x007FFFU,
          0x008000U, 0x008001U, 0x017FFFU, 0x018000U, 0x018001U, 0x7FE000U, 0x7FEFFFU, 0x7FF000U,
          0x7F7FFFU, 0x7F8000U, 0x7FFFFFU}) {
      const auto number =
          static_cast<float>(std::ldexp(1.0 + static_cast<double>(mantissa) / (1 << 23), exponent));
      numbers.insert(numbers.end(), {number, -number});
    }
  }
  return numbers;
}

// Of the two neighbours the nearer one; of equally near ones the even one.
void expect_nearest_even(float number, std::uint16_t rounded, HalfFormat format) {
  const auto distance = [&](std::uint16_t bits) {
    // Infinity is as far as the number that would follow the largest one.
    double value = value_of(bits, format);
    if (std::isinf(value)) {
      value = std::copysign(format == HalfFormat::kBfloat16 ? std::ldexp(1, 128) : 65536, value);
    }
    return std::abs(value - number);
  };
  ASSERT_EQ(std::signbit(number), (rounded & 0x8000) != 0) << number;
  if (std::isinf(number)) {
    EXPECT_EQ(value_of(rounded, format), number);
    return;
  }
  const std::uint16_t magnitude = rounded & 0x7FFF;
  for (int step : {-1, 1}) {
    if (magnitude + step < 0 || std::isnan(value_of(rounded + step, format))) continue;
    const double mine = distance(rounded), other = distance(rounded + step);
    EXPECT_TRUE(mine < other || (mine == other && (rounded & 1) == 0)) << number;
  }
}

TEST(Half, RoundsToNearestEven) {
  for (float number : interesting_numbers()) {
    expect_nearest_even(number, bfloat16_bits(number), HalfFormat::kBfloat16);
    expect_nearest_even(number, float16_bits(number), HalfFormat::kFloat16);
  }
  EXPECT_TRUE(std::isnan(value_of(bfloat16_bits(NAN), HalfFormat::kBfloat16)));
  EXPECT_TRUE(std::isnan(value_of(float16_bits(NAN), HalfFormat::kFloat16)));
}

TEST(Half, SplitsWithoutLossAndRoundsTiesAway) {
  for (float number : interesting_numbers()) {
    const SplitFloat parts = split(number);
    EXPECT_EQ(bits_of(join(parts)), bits_of(number)) << number;
    const bool is_tie = (bits_of(number) & 0xFFFF) == 0x8000;
    if (is_tie) {
      EXPECT_EQ(parts.high, (bits_of(number) >> 16) + 1) << number;
    } else {
      EXPECT_EQ(parts.high, bfloat16_bits(number)) << number;
    }
  }
  for (std::uint32_t nan : {0x7FC00000U, 0x7FFFFFFFU, 0xFFFFFFFFU, 0x7F800001U}) {
    const SplitFloat parts = split(float_of(nan));
    EXPECT_TRUE(std::isnan(join(parts)));
    EXPECT_TRUE(std::isnan(value_of(parts.high, HalfFormat::kBfloat16)));
  }
}

struct State {
  std::vector<float> w, g, momentum_buffer, exp_avg, exp_avg_sq;
};

State random_state(std::size_t n) {
  std::mt19937 generator(static_cast<unsigned>(n));
  std::normal_distribution<float> normal;
  State x;
  for (auto* array : {&x.w, &x.g, &x.momentum_buffer, &x.exp_avg, &x.exp_avg_sq}) {
    for (std::size_t i = 0; i < n; ++i) array->push_back(normal(generator));
  }
  for (float& value : x.exp_avg_sq) value *= value;
  for (std::size_t i = 5; i < n; i += 40) {  // where a step of 0 leaves them
    x.w[i] = float_of(0x3F808000);
    x.g[i] = x.momentum_buffer[i] = x.exp_avg[i] = 0;
  }
  if (n > 60) x.w[57] = kInf, x.w[58] = 1e-42F, x.w[59] = 70000.0F, x.g[60] = NAN;
  return x;
}

// One step each of SGD with momentum and of Adam.
template <typename Weights>
void step(const Weights& weights, State& x, std::size_t begin, std::size_t end) {
  const auto n = static_cast<std::int64_t>(end - begin);
  SgdOptions sgd;
  sgd.momentum = 0.9;
  step_cpu(weights.at(begin), x.g.data() + begin, {x.momentum_buffer.data() + begin}, n, sgd);
  AdamOptions adam;
  adam.weight_decay = 0.01;
  step_cpu(weights.at(begin), x.g.data() + begin,
           {x.exp_avg.data() + begin, x.exp_avg_sq.data() + begin}, n, adam);
}

std::vector<std::uint32_t> bits_of_all(const std::vector<float>& numbers) {
  std::vector<std::uint32_t> bits;
  for (float number : numbers) bits.push_back(std::isnan(number) ? 0x7FC00000 : bits_of(number));
  return bits;
}

class MixedPrecision : public ::testing::TestWithParam<InstructionSet> {
 protected:
  void SetUp() override {
    if (!is_supported(GetParam())) GTEST_SKIP() << "not supported by this machine";
    set_instruction_set(GetParam());
  }
  void TearDown() override { set_instruction_set(before_); }

 private:
  InstructionSet before_ = instruction_set();
};

INSTANTIATE_TEST_SUITE_P(EveryInstructionSet, MixedPrecision,
                         ::testing::Values(InstructionSet::kPortable, InstructionSet::kAvx2,
                                           InstructionSet::kAvx512));

const std::vector<std::size_t> kLengths{0, 1, 3, 8, 16, 31, 32, 33, 64, 77, 130, 70'003};

template <HalfFormat kFormat>
void check_master() {
  for (std::size_t n : kLengths) {
    for (std::size_t off : {0, 1}) {
      State plain = random_state(n + off), mixed = plain;
      std::vector<std::uint16_t> half(n + off + 1, 0x1234);
      step(PlainWeights<float>{plain.w.data(), plain.w.data()}, plain, off, n + off);
      step(MasterWeights<kFormat>{mixed.w.data(), half.data()}, mixed, off, n + off);
      EXPECT_EQ(bits_of_all(mixed.w), bits_of_all(plain.w)) << n;
      EXPECT_EQ(bits_of_all(mixed.exp_avg), bits_of_all(plain.exp_avg)) << n;
      for (std::size_t i = off; i < n + off; ++i) {
        EXPECT_EQ(half[i], kFormat == HalfFormat::kBfloat16 ? bfloat16_bits(mixed.w[i])
                                                            : float16_bits(mixed.w[i]))
            << i << " of " << n << ": " << mixed.w[i];
      }
      EXPECT_EQ(half.back(), 0x1234);
      EXPECT_EQ(off > 0 ? half.front() : 0x1234, 0x1234);
    }
  }
}

TEST_P(MixedPrecision, StepsTheMasterAndRoundsIt) {
  check_master<HalfFormat::kBfloat16>();
  check_master<HalfFormat::kFloat16>();
}

TEST_P(MixedPrecision, StepsASplitMasterToTheSameBits) {
  for (std::size_t n : kLengths) {
    for (bool in_place : {false, true}) {
      State plain = random_state(n), mixed = plain;
      std::vector<std::uint16_t> high(n), high_out(n);
      std::vector<std::int16_t> remainder(n);
      for (std::size_t i = 0; i < n; ++i) {
        const SplitFloat parts = split(plain.w[i]);
        high[i] = parts.high, remainder[i] = parts.remainder;
      }
      std::vector<std::uint16_t>& out = in_place ? high : high_out;
      SgdOptions sgd;
      sgd.momentum = 0.9;
      const auto length = static_cast<std::int64_t>(n);
      step_cpu(PlainWeights<float>{plain.w.data(), plain.w.data()}, plain.g.data(),
               {plain.momentum_buffer.data()}, length, sgd);
      step_cpu(SplitWeights{high.data(), remainder.data(), out.data()}, mixed.g.data(),
               {mixed.momentum_buffer.data()}, length, sgd);
      for (std::size_t i = 0; i < n; ++i) mixed.w[i] = join({out[i], remainder[i]});
      EXPECT_EQ(bits_of_all(mixed.w), bits_of_all(plain.w)) << n;
      for (std::size_t i = 0; i < n; ++i) {
        EXPECT_EQ(out[i], split(plain.w[i]).high) << i << " of " << n;
      }
    }
  }
}

// Bfloat16 gradients are stepped as the float32 that they are, and may be where the weights go.
template <typename Weights, typename Make>
void check_bfloat16_gradients(const Make& make) {
  for (std::size_t n : kLengths) {
    for (bool replaces : {false, true}) {
      State wide = random_state(n);
      std::vector<std::uint16_t> g(n);
      for (std::size_t i = 0; i < n; ++i) {
        g[i] = bfloat16_bits(wide.g[i]);
        wide.g[i] = float_of_bfloat16(g[i]);
      }
      State narrow = wide;
      std::vector<std::uint16_t> high(n), out(n), wide_out(n);
      std::vector<std::int16_t> remainder(n), wide_remainder(n);
      for (std::size_t i = 0; i < n; ++i) {
        const SplitFloat parts = split(wide.w[i]);
        high[i] = parts.high, remainder[i] = wide_remainder[i] = parts.remainder;
      }
      std::uint16_t* to = replaces ? g.data() : out.data();
      const std::vector<std::uint16_t> gradient = g;
      SgdOptions sgd;
      sgd.momentum = 0.9;
      const auto length = static_cast<std::int64_t>(n);
      step_cpu(make(wide.w, high, wide_remainder, wide_out.data()), wide.g.data(),
               {wide.momentum_buffer.data()}, length, sgd);
      step_cpu(Bfloat16Gradients<Weights>{make(narrow.w, high, remainder, to)}, g.data(),
               {narrow.momentum_buffer.data()}, length, sgd);
      EXPECT_EQ(bits_of_all(narrow.w), bits_of_all(wide.w)) << n;
      EXPECT_EQ(remainder, wide_remainder) << n;
      EXPECT_EQ(bits_of_all(narrow.momentum_buffer), bits_of_all(wide.momentum_buffer)) << n;
      for (std::size_t i = 0; i < n; ++i) EXPECT_EQ(to[i], wide_out[i]) << i << " of " << n;
      EXPECT_TRUE(replaces || g == gradient) << n;
    }
  }
}

TEST_P(MixedPrecision, StepsByBfloat16GradientsToTheBitsOfTheSameInFloat32) {
  using Master = MasterWeights<HalfFormat::kBfloat16>;
  check_bfloat16_gradients<Master>([](auto& master, auto&, auto&, std::uint16_t* out) {
    return Master{master.data(), out};
  });
  check_bfloat16_gradients<SplitWeights>(
      [](auto&, auto& high, auto& remainder, std::uint16_t* out) {
        return SplitWeights{high.data(), remainder.data(), out};
      });
}

}  // namespace
}  // namespace pd2::kernels
