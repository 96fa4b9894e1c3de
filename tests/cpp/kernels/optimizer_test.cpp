#include "kernels/optimizer.h"

#include "kernels/cpu/instruction_set.h"
#include "kernels/cpu/step.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace pd2::kernels {
namespace {

// Products apart, so that no compiler fuses them with the sum that follows.
template <typename T>
[[gnu::noinline]] T product(T a, T b) {
  return a * b;
}

template <typename T>
struct Weights {
  std::vector<T> w, g, momentum_buffer, exp_avg, exp_avg_sq, max_exp_avg_sq;
};

// One element after the other, as torch.optim.SGD's documentation gives it.
template <typename T>
void sgd_by_definition(Weights<T>& x, const SgdOptions& o) {
  for (std::size_t i = 0; i < x.w.size(); ++i) {
    T g = o.maximize ? -x.g[i] : x.g[i];
    if (o.weight_decay != 0) g = std::fma(x.w[i], static_cast<T>(o.weight_decay), g);
    if (o.momentum != 0) {
      T& buffer = x.momentum_buffer[i];
      if (o.first_step) {
        buffer = g;
      } else {
        const T decayed = product(buffer, static_cast<T>(o.momentum));
        buffer = std::fma(g, static_cast<T>(1 - o.dampening), decayed);
      }
      g = o.nesterov ? std::fma(buffer, static_cast<T>(o.momentum), g) : buffer;
    }
    x.w[i] = std::fma(g, static_cast<T>(-o.lr), x.w[i]);
  }
}

// The same for torch.optim.Adam and AdamW.
template <typename T>
void adam_by_definition(Weights<T>& x, const AdamOptions& o) {
  const double correction1 = 1 - std::pow(o.beta1, static_cast<double>(o.step));
  const double correction2 = 1 - std::pow(o.beta2, static_cast<double>(o.step));
  for (std::size_t i = 0; i < x.w.size(); ++i) {
    T g = o.maximize ? -x.g[i] : x.g[i];
    T w = x.w[i];
    if (o.weight_decay != 0 && o.decoupled_weight_decay) {
      w = product(w, static_cast<T>(1 - o.lr * o.weight_decay));
    } else if (o.weight_decay != 0) {
      g = std::fma(w, static_cast<T>(o.weight_decay), g);
    }
    const T weight = static_cast<T>(1 - o.beta1);
    const T distance = g - x.exp_avg[i];
    x.exp_avg[i] = weight < T(0.5) ? std::fma(weight, distance, x.exp_avg[i])
                                   : std::fma(weight - 1, distance, g);
    const T decayed = product(x.exp_avg_sq[i], static_cast<T>(o.beta2));
    x.exp_avg_sq[i] = std::fma(product(static_cast<T>(1 - o.beta2), g), g, decayed);
    T second = x.exp_avg_sq[i];
    if (o.amsgrad) {
      T& largest = x.max_exp_avg_sq[i];
      if (std::isnan(second) || second > largest) largest = second;
      second = largest;
    }
    const T root = std::sqrt(second) / static_cast<T>(std::sqrt(correction2));
    const T numerator = product(static_cast<T>(-o.lr / correction1), x.exp_avg[i]);
    x.w[i] = w + numerator / (root + static_cast<T>(o.eps));
  }
}

// An array that begins `offset` elements after a 64-byte boundary, between guards.
template <typename T>
class GuardedArray {
 public:
  GuardedArray(std::size_t n, std::size_t offset, T fill = T(0))
      : n_(n), storage_(n + offset + 4 * kGuard, guard()) {
    const auto address = reinterpret_cast<std::uintptr_t>(storage_.data() + kGuard);
    begin_ = kGuard + (64 - address % 64) % 64 / sizeof(T) + offset;
    for (std::size_t i = 0; i < n_; ++i) data()[i] = fill;
  }
  GuardedArray(const std::vector<T>& values, std::size_t offset)
      : GuardedArray(values.size(), offset) {
    if (n_ > 0) std::memcpy(data(), values.data(), n_ * sizeof(T));
  }

  T* data() { return storage_.data() + begin_; }
  std::vector<T> values() const {
    return {storage_.begin() + begin_, storage_.begin() + begin_ + n_};
  }
  bool guards_intact() const {
    for (std::size_t i = 0; i < storage_.size(); ++i) {
      if ((i < begin_ || i >= begin_ + n_) && storage_[i] != guard()) return false;
    }
    return true;
  }

 private:
  static constexpr std::size_t kGuard = 64 / sizeof(T);
  static T guard() { return T(-12345.5); }
  std::size_t n_, begin_;
  std::vector<T> storage_;
};

template <typename T>
::testing::AssertionResult same_bits(const std::vector<T>& actual, const std::vector<T>& expected) {
  if (actual.size() != expected.size()) return ::testing::AssertionFailure() << "other sizes";
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const bool both_nan = std::isnan(actual[i]) && std::isnan(expected[i]);
    if (!both_nan && std::memcmp(&actual[i], &expected[i], sizeof(T)) != 0) {
      return ::testing::AssertionFailure() << "element " << i << " of " << actual.size() << ": "
                                           << actual[i] << ", expected " << expected[i];
    }
  }
  return ::testing::AssertionSuccess();
}

template <typename T>
Weights<T> random_weights(std::size_t n) {
  std::mt19937 generator(static_cast<unsigned>(n));
  std::normal_distribution<double> normal;
  Weights<T> x;
  for (auto* array : {&x.w, &x.g, &x.momentum_buffer, &x.exp_avg}) {
    for (std::size_t i = 0; i < n; ++i) array->push_back(static_cast<T>(normal(generator)));
  }
  for (auto* array : {&x.exp_avg_sq, &x.max_exp_avg_sq}) {
    for (std::size_t i = 0; i < n; ++i) {
      array->push_back(static_cast<T>(std::pow(normal(generator), 2)));
    }
  }
  return x;
}

enum class Target { kElsewhere, kWeights, kGradient };

// One step of the kernel on guarded copies of `x`, whose arrays begin at different offsets if
// `unaligned`; the results replace those in `x`.
template <typename T, typename Options>
void step_by_kernel(Weights<T>& x, const Options& options, bool unaligned = false,
                    Target target = Target::kElsewhere) {
  const std::size_t off = unaligned ? 1 : 0;
  GuardedArray<T> w(x.w, off), g(x.g, 3 * off), out(x.w.size(), 2 * off);
  GuardedArray<T> momentum_buffer(x.momentum_buffer, 5 * off), exp_avg(x.exp_avg, 4 * off),
      exp_avg_sq(x.exp_avg_sq, off), max_exp_avg_sq(x.max_exp_avg_sq, 7 * off);
  GuardedArray<T>& w_out =
      target == Target::kElsewhere ? out : (target == Target::kWeights ? w : g);
  const auto n = static_cast<std::int64_t>(x.w.size());
  if constexpr (std::is_same_v<Options, SgdOptions>) {
    step_cpu(PlainWeights<T>{w.data(), w_out.data()}, g.data(),
             {options.momentum != 0 ? momentum_buffer.data() : nullptr}, n, options);
  } else {
    step_cpu(PlainWeights<T>{w.data(), w_out.data()}, g.data(),
             {exp_avg.data(), exp_avg_sq.data(), options.amsgrad ? max_exp_avg_sq.data() : nullptr},
             n, options);
  }
  for (const auto* array :
       {&w, &g, &out, &momentum_buffer, &exp_avg, &exp_avg_sq, &max_exp_avg_sq}) {
    EXPECT_TRUE(array->guards_intact()) << "n = " << n;
  }
  if (target == Target::kElsewhere) {
    EXPECT_TRUE(same_bits(w.values(), x.w)) << "the old weights were changed";
    EXPECT_TRUE(same_bits(g.values(), x.g)) << "the gradient was changed";
  }
  x.w = w_out.values();
  x.momentum_buffer = momentum_buffer.values();
  x.exp_avg = exp_avg.values();
  x.exp_avg_sq = exp_avg_sq.values();
  x.max_exp_avg_sq = max_exp_avg_sq.values();
}

template <typename T>
void expect_equal(const Weights<T>& actual, const Weights<T>& expected) {
  EXPECT_TRUE(same_bits(actual.w, expected.w)) << "weights";
  EXPECT_TRUE(same_bits(actual.momentum_buffer, expected.momentum_buffer)) << "momentum_buffer";
  EXPECT_TRUE(same_bits(actual.exp_avg, expected.exp_avg)) << "exp_avg";
  EXPECT_TRUE(same_bits(actual.exp_avg_sq, expected.exp_avg_sq)) << "exp_avg_sq";
  EXPECT_TRUE(same_bits(actual.max_exp_avg_sq, expected.max_exp_avg_sq)) << "max_exp_avg_sq";
}

std::vector<SgdOptions> sgd_cases() {
  return {
      {.lr = 0.1},
      {.lr = 0.3, .weight_decay = 0.01, .maximize = true},
      {.lr = 0.03, .momentum = 0.9},
      {.lr = 0.03, .momentum = 0.9, .dampening = 0.3, .weight_decay = 0.1},
      {.lr = 0.03, .momentum = 0.9, .dampening = 0.3, .first_step = true},
      {.lr = 0.07, .momentum = 0.8, .weight_decay = 0.1, .nesterov = true, .maximize = true},
      {.lr = 0.07, .momentum = 0.8, .nesterov = true, .first_step = true},
  };
}

std::vector<AdamOptions> adam_cases() {
  return {
      {.lr = 0.01, .step = 1},
      {.lr = 0.01, .weight_decay = 0.1, .step = 7, .maximize = true},
      {.lr = 0.01, .weight_decay = 0.1, .step = 2, .amsgrad = true},
      {.lr = 0.02, .weight_decay = 0.1, .step = 1000, .decoupled_weight_decay = true},
      {.lr = 0.02,
       .beta1 = 0.3,
       .beta2 = 0.95,
       .eps = 1e-3,
       .weight_decay = 0.2,
       .step = 3,
       .decoupled_weight_decay = true,
       .amsgrad = true,
       .maximize = true},
      {.lr = 0.02, .beta1 = 0.5, .step = 4},
      {.lr = 0.02, .beta1 = 0.0, .step = 4},
  };
}

class OptimizerPass : public ::testing::TestWithParam<InstructionSet> {
 protected:
  void SetUp() override {
    if (!is_supported(GetParam())) GTEST_SKIP() << "not on this machine";
    set_instruction_set(GetParam());
  }
  void TearDown() override { set_instruction_set(before_); }

 private:
  InstructionSet before_ = instruction_set();
};

std::string name_of(const ::testing::TestParamInfo<InstructionSet>& info) {
  switch (info.param) {
    case InstructionSet::kPortable:
      return "Portable";
    case InstructionSet::kAvx2:
      return "Avx2";
    case InstructionSet::kAvx512:
      return "Avx512";
  }
  return "Unknown";
}

INSTANTIATE_TEST_SUITE_P(EveryInstructionSet, OptimizerPass,
                         ::testing::Values(InstructionSet::kPortable, InstructionSet::kAvx2,
                                           InstructionSet::kAvx512),
                         name_of);

template <typename T>
void check_definition(std::size_t n, bool unaligned, Target target,
                      const std::vector<SgdOptions>& sgd, const std::vector<AdamOptions>& adam) {
  SCOPED_TRACE("n = " + std::to_string(n) + ", bytes per element: " + std::to_string(sizeof(T)));
  const Weights<T> before = random_weights<T>(n);
  for (const SgdOptions& options : sgd) {
    Weights<T> actual = before, expected = before;
    step_by_kernel(actual, options, unaligned, target);
    sgd_by_definition(expected, options);
    expect_equal(actual, expected);
  }
  for (const AdamOptions& options : adam) {
    Weights<T> actual = before, expected = before;
    step_by_kernel(actual, options, unaligned, target);
    adam_by_definition(expected, options);
    expect_equal(actual, expected);
  }
}

void check_definition(std::size_t n, bool unaligned, Target target) {
  check_definition<float>(n, unaligned, target, sgd_cases(), adam_cases());
  check_definition<double>(n, unaligned, target, sgd_cases(), adam_cases());
}

TEST_P(OptimizerPass, EqualsTheDefinitionBitForBitForEveryLength) {
  for (std::size_t n = 0; n <= 130; ++n) {
    check_definition(n, false, Target::kElsewhere);
  }
}

TEST_P(OptimizerPass, DoesNotDependOnAlignment) {
  for (std::size_t n = 0; n <= 130; ++n) {
    check_definition(n, true, Target::kElsewhere);
  }
}

TEST_P(OptimizerPass, MayWriteOverTheWeightsOrTheGradient) {
  for (std::size_t n : {1, 16, 77, 130}) {
    for (Target target : {Target::kWeights, Target::kGradient}) check_definition(n, false, target);
  }
}

TEST_P(OptimizerPass, StreamsLargeArraysToTheSameBits) {
  const std::vector<SgdOptions> sgd{sgd_cases()[3]};
  const std::vector<AdamOptions> adam{adam_cases()[4]};
  for (bool unaligned : {false, true}) {
    check_definition<float>(70'003, unaligned, Target::kElsewhere, sgd, adam);
    check_definition<double>(35'005, unaligned, Target::kElsewhere, sgd, adam);
  }
  check_definition<float>(70'003, false, Target::kWeights, sgd, adam);
}

TEST_P(OptimizerPass, DoesNotDependOnHowAnArrayIsDivided) {
  constexpr std::size_t kLength = 1000;
  const AdamOptions options = adam_cases()[4];
  Weights<float> whole = random_weights<float>(kLength), parts = whole;
  std::vector<float> w_out(kLength);
  step_cpu(PlainWeights<float>{whole.w.data(), w_out.data()}, whole.g.data(),
           {whole.exp_avg.data(), whole.exp_avg_sq.data(), whole.max_exp_avg_sq.data()}, kLength,
           options);
  std::vector<float> w_out_parts(kLength);
  std::size_t begin = 0;
  for (std::size_t end : {1, 18, 50, 51, 500, 1000}) {
    step_cpu(PlainWeights<float>{parts.w.data() + begin, w_out_parts.data() + begin},
             parts.g.data() + begin,
             {parts.exp_avg.data() + begin, parts.exp_avg_sq.data() + begin,
              parts.max_exp_avg_sq.data() + begin},
             static_cast<std::int64_t>(end - begin), options);
    begin = end;
  }
  EXPECT_TRUE(same_bits(w_out_parts, w_out));
  expect_equal(parts, whole);
}

TEST_P(OptimizerPass, CarriesInfinitiesAndNaNsThrough) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  for (const AdamOptions& options : adam_cases()) {
    Weights<float> actual = random_weights<float>(100);
    actual.g[3] = kInf, actual.g[20] = -kInf, actual.g[37] = kNan, actual.g[99] = kNan;
    actual.exp_avg_sq[5] = kInf, actual.max_exp_avg_sq[6] = kNan, actual.max_exp_avg_sq[98] = kNan;
    actual.exp_avg_sq[40] = 0, actual.exp_avg[40] = 0, actual.g[40] = 0;
    actual.exp_avg_sq[41] = 1e-45F, actual.g[42] = 1e-30F, actual.g[43] = 3e38F;
    Weights<float> expected = actual;
    step_by_kernel(actual, options);
    adam_by_definition(expected, options);
    expect_equal(actual, expected);
  }
}

TEST(InstructionSet, IsTheBestThatTheMachineHas) {
  EXPECT_TRUE(is_supported(InstructionSet::kPortable));
  EXPECT_TRUE(is_supported(instruction_set()));
  for (InstructionSet better : {InstructionSet::kAvx2, InstructionSet::kAvx512}) {
    EXPECT_TRUE(!is_supported(better) || instruction_set() >= better);
  }
}

}  // namespace
}  // namespace pd2::kernels
