// The bodies of the GPU's kernels, run on the host thread by thread, against the CPU's passes and
// plain sums.
#include "checked_device/host_grid.h"
#include "kernels/cpu/step.h"
#include "kernels/half.h"
#include "kernels/optimizer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

namespace pd2::kernels {
namespace {

constexpr std::size_t kGuard = 64;  // bytes before and after an array
constexpr auto kGuardByte = std::byte{0xA5};

// An array that begins `offset` elements after a 64-byte boundary, between guards.
template <typename T>
class Array {
 public:
  Array(std::size_t n, std::size_t offset, unsigned seed, double scale = 1)
      : n_(n), bytes_((n + offset) * sizeof(T) + 4 * kGuard, kGuardByte) {
    const auto address = reinterpret_cast<std::uintptr_t>(bytes_.data() + kGuard);
    begin_ = kGuard + (64 - address % 64) % 64 + offset * sizeof(T);
    std::mt19937 generator(seed);
    std::normal_distribution<double> normal;
    for (std::size_t i = 0; i < n_; ++i) {
      const double number = scale * normal(generator);
      if constexpr (std::is_floating_point_v<T>) {
        data()[i] = static_cast<T>(scale < 0 ? number * number : number);
      } else {
        data()[i] = static_cast<T>(generator());
      }
    }
  }
  Array(const Array& other, std::size_t offset) : Array(other.n_, offset, 0) {
    if (n_ > 0) std::memcpy(data(), other.data(), n_ * sizeof(T));
  }

  T* data() { return reinterpret_cast<T*>(bytes_.data() + begin_); }
  const T* data() const { return reinterpret_cast<const T*>(bytes_.data() + begin_); }
  std::size_t size() const { return n_; }
  bool guards_intact() const {
    for (std::size_t i = 0; i < bytes_.size(); ++i) {
      if ((i < begin_ || i >= begin_ + n_ * sizeof(T)) && bytes_[i] != kGuardByte) return false;
    }
    return true;
  }

 private:
  std::size_t n_, begin_ = 0;
  std::vector<std::byte> bytes_;
};

template <typename T>
::testing::AssertionResult same_bits(const Array<T>& actual, const Array<T>& expected) {
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const T a = actual.data()[i], b = expected.data()[i];
    if constexpr (std::is_floating_point_v<T>) {
      if (std::isnan(a) && std::isnan(b)) continue;
    }
    if (std::memcmp(&a, &b, sizeof(T)) != 0) {
      return ::testing::AssertionFailure()
             << "element " << i << " of " << expected.size() << ": " << a << ", expected " << b;
    }
  }
  return ::testing::AssertionSuccess();
}

template <typename Weights>
constexpr bool kHasBfloat16Gradients =
    !std::is_same_v<typename Weights::Gradient, typename Weights::Scalar>;

template <typename Weights>
constexpr WeightsKind kind_of() {
  if (std::is_same_v<Weights, PlainWeights<float>>) return WeightsKind::kFloat;
  if (std::is_same_v<Weights, PlainWeights<double>>) return WeightsKind::kDouble;
  if (std::is_base_of_v<SplitWeights, Weights>) return WeightsKind::kSplit;
  return std::is_base_of_v<MasterWeights<HalfFormat::kBfloat16>, Weights>
             ? WeightsKind::kBfloat16Master
             : WeightsKind::kFloat16Master;
}

enum class Target { kElsewhere, kWeights, kGradient };

// The flat arrays of a stage, each at its own offset from a boundary if `unaligned`.
template <typename Weights>
struct Flat {
  using T = typename Weights::Scalar;
  using Out = typename Weights::Out;
  static constexpr bool kIsPlain = std::is_same_v<T, Out>;
  using G = typename Weights::Gradient;
  static constexpr bool kMayReplaceGradient = std::is_same_v<G, Out>;
  static constexpr bool kIsSplit = std::is_base_of_v<SplitWeights, Weights>;
  using Master = std::conditional_t<kIsSplit, std::int16_t, T>;

  explicit Flat(std::size_t n, Target target = Target::kElsewhere)
      : w(n, 0, 1),
        out(n, 0, 2),
        master(n, 0, 3),
        g(n, 0, 4),
        state0(n, 0, 5),
        state1(n, 0, 6, -1),
        state2(n, 0, 7, -1),
        target(target) {
    if constexpr (!kIsPlain) {  // no not-a-numbers: their bits may differ
      for (std::size_t i = 0; i < n; ++i) {
        w.data()[i] = bfloat16_bits(static_cast<float>(i % 97) - 48.5F);
      }
    }
    if constexpr (kHasBfloat16Gradients<Weights>) {
      for (std::size_t i = 0; i < n; ++i) {
        g.data()[i] = bfloat16_bits((static_cast<float>(i % 89) - 44.5F) / 3);
      }
    }
  }
  Flat(const Flat& other, bool unaligned)
      : w(other.w, unaligned ? 1 : 0),
        out(other.out, unaligned ? 3 : 0),
        master(other.master, unaligned ? 1 : 0),
        g(other.g, unaligned ? 5 : 0),
        state0(other.state0, unaligned ? 2 : 0),
        state1(other.state1, unaligned ? 7 : 0),
        state2(other.state2, unaligned ? 1 : 0),
        target(other.target) {}

  Out* w_out() {
    if (target == Target::kWeights) return w.data();
    if constexpr (kMayReplaceGradient) {
      if (target == Target::kGradient) return g.data();
    }
    return out.data();
  }
  Weights weights() {
    if constexpr (kIsPlain) {
      return {w.data(), w_out()};
    } else if constexpr (kHasBfloat16Gradients<Weights> && kIsSplit) {
      return {{w.data(), master.data(), w_out()}};
    } else if constexpr (kHasBfloat16Gradients<Weights>) {
      return {{master.data(), w_out()}};
    } else if constexpr (kIsSplit) {
      return {w.data(), master.data(), w_out()};
    } else {
      return {master.data(), w_out()};
    }
  }
  void expect_equal(const Flat& expected) const {
    EXPECT_TRUE(same_bits(w, expected.w)) << "w";
    EXPECT_TRUE(same_bits(out, expected.out)) << "w_out";
    EXPECT_TRUE(same_bits(master, expected.master)) << "master";
    EXPECT_TRUE(same_bits(g, expected.g)) << "gradient";
    EXPECT_TRUE(same_bits(state0, expected.state0)) << "state 0";
    EXPECT_TRUE(same_bits(state1, expected.state1)) << "state 1";
    EXPECT_TRUE(same_bits(state2, expected.state2)) << "state 2";
    EXPECT_TRUE(w.guards_intact() && out.guards_intact() && master.guards_intact() &&
                g.guards_intact() && state0.guards_intact() && state1.guards_intact() &&
                state2.guards_intact());
  }

  Array<Out> w, out;
  Array<Master> master;
  Array<G> g;
  Array<T> state0, state1, state2;
  Target target;
};

template <typename T>
void scale(T* g, std::int64_t n, T by) {
  for (std::int64_t i = 0; i < n; ++i) g[i] *= by;
}
void scale(std::uint16_t* g, std::int64_t n, float by) {
  for (std::int64_t i = 0; i < n; ++i) g[i] = bfloat16_bits(float_of_bfloat16(g[i]) * by);
}

template <typename Weights>
void step_on_cpu(Flat<Weights>& flat, const StepOfRun& run, double gradient_scale) {
  using T = typename Weights::Scalar;
  const std::int64_t n = run.end - run.begin;
  auto* g = flat.g.data() + run.begin;
  T *state0 = flat.state0.data() + run.state, *state1 = flat.state1.data() + run.state;
  T* state2 = flat.state2.data() + run.state;
  const Weights weights = flat.weights().at(run.begin);
  if (const auto* sgd = std::get_if<SgdOptions>(&run.options)) {
    scale(g, n, static_cast<T>(gradient_scale));
    step_cpu(weights, g, {sgd->momentum != 0 ? state0 : nullptr}, n, *sgd);
  } else if (const auto* adam = std::get_if<AdamOptions>(&run.options)) {
    scale(g, n, static_cast<T>(gradient_scale));
    step_cpu(weights, g, {state0, state1, adam->amsgrad ? state2 : nullptr}, n, *adam);
  } else if (flat.w.data() != flat.w_out()) {
    std::memcpy(flat.w_out() + run.begin, flat.w.data() + run.begin,
                n * sizeof(typename Weights::Out));
  }
}

struct Launched {
  StepRule rule;
  std::vector<StepOfRun> runs;
  double gradient_scale = 1;
  std::int64_t num_blocks = 3;
};

template <typename Weights>
void step_by_grid(Flat<Weights>& flat, const Launched& launched) {
  const std::vector<std::byte> table =
      step_table(launched.rule, kind_of<Weights>(), launched.runs, launched.gradient_scale);
  step_on_host({.rule = launched.rule,
                .kind = kind_of<Weights>(),
                .w = flat.w.data(),
                .w_out = flat.w_out(),
                .master = flat.master.data(),
                .g = flat.g.data(),
                .has_bfloat16_gradients = kHasBfloat16Gradients<Weights>,
                .state = {flat.state0.data(), flat.state1.data(), flat.state2.data()},
                .table = table.data(),
                .num_chunks = 1},
               launched.num_blocks);
}

std::vector<StepOfRun> one_run(std::int64_t n, decltype(StepOfRun::options) options) {
  return {{.begin = 0, .end = n, .state = 0, .options = options}};
}

// Compares; what the CPU scaled in place the kernel leaves alone.
template <typename Weights>
void check(const Flat<Weights>& before, const Launched& launched, bool unaligned) {
  Flat<Weights> actual(before, unaligned), expected(before, false);
  step_by_grid(actual, launched);
  for (const StepOfRun& run : launched.runs) {
    step_on_cpu(expected, run, launched.gradient_scale);
  }
  if (launched.gradient_scale != 1 && before.target != Target::kGradient) {
    std::memcpy(expected.g.data(), before.g.data(), before.g.size() * sizeof(*before.g.data()));
  }
  actual.expect_equal(expected);
}

std::vector<Launched> cases(std::int64_t n) {
  const SgdOptions plain{.lr = 0.1};
  const SgdOptions momentum{.lr = 0.03,
                            .momentum = 0.9,
                            .dampening = 0.3,
                            .weight_decay = 0.1,
                            .nesterov = true,
                            .maximize = true};
  const SgdOptions first{.lr = 0.03, .momentum = 0.9, .dampening = 0.3, .first_step = true};
  const AdamOptions adam{.lr = 0.01, .weight_decay = 0.1, .step = 7};
  const AdamOptions amsgrad{.lr = 0.02,
                            .beta1 = 0.3,
                            .weight_decay = 0.2,
                            .step = 3,
                            .decoupled_weight_decay = true,
                            .amsgrad = true,
                            .maximize = true};
  return {
      {StepRule::kSgd, one_run(n, plain)},    {StepRule::kSgd, one_run(n, momentum), 0.37},
      {StepRule::kSgd, one_run(n, first)},    {StepRule::kAdam, one_run(n, adam), 1e-3},
      {StepRule::kAdam, one_run(n, amsgrad)}, {StepRule::kSgd, one_run(n, std::monostate())},
  };
}

template <typename Weights>
class StepKernel : public ::testing::Test {};
using EveryKind =
    ::testing::Types<PlainWeights<float>, PlainWeights<double>,
                     MasterWeights<HalfFormat::kBfloat16>, MasterWeights<HalfFormat::kFloat16>,
                     SplitWeights, Bfloat16Gradients<MasterWeights<HalfFormat::kBfloat16>>,
                     Bfloat16Gradients<SplitWeights>>;
TYPED_TEST_SUITE(StepKernel, EveryKind);

TYPED_TEST(StepKernel, GivesTheBitsOfTheCpuForEveryLengthAndAlignment) {
  for (std::int64_t n = 0; n <= 4097; n += n < 70 || n >= 4090 ? 1 : 331) {
    for (const bool unaligned : {false, true}) {
      SCOPED_TRACE("n = " + std::to_string(n) + (unaligned ? ", unaligned" : ""));
      const Flat<TypeParam> before(n);
      for (const Launched& launched : cases(n)) check(before, launched, unaligned);
      if (this->HasFailure()) return;
    }
  }
}

TYPED_TEST(StepKernel, MayWriteOverTheWeightsOrTheGradient) {
  for (const std::int64_t n : {1, 77, 4097, 9000}) {
    for (const Target target : {Target::kWeights, Target::kGradient}) {
      // A master's version is not what is stepped: nothing is written over.
      if (!Flat<TypeParam>::kMayReplaceGradient && target == Target::kGradient) continue;
      const Flat<TypeParam> before(n, target);
      for (const Launched& launched : cases(n)) check(before, launched, false);
    }
  }
}

// As many as a large model has: with and without decay, some without gradient, of all sizes.
TYPED_TEST(StepKernel, StepsATableOfManyRunsInOneLaunch) {
  for (const StepRule rule : {StepRule::kSgd, StepRule::kAdam}) {
    std::mt19937 generator(3);
    Launched launched{rule, {}, 0.5};
    std::int64_t end = 0, state = 0;
    for (int i = 0; i < 200; ++i) {
      StepOfRun run{.begin = end, .end = end + 1, .state = state, .options = {}};
      run.end += i % 20 == 0 ? 4096 * 3 + i : generator() % 300;
      if (i % 7 == 3) {
        run.options = std::monostate();
      } else if (rule == StepRule::kSgd) {
        run.options = SgdOptions{.lr = 0.1 * i,
                                 .momentum = i % 2 == 0 ? 0.9 : 0.0,
                                 .weight_decay = i % 3 * 0.1,
                                 .first_step = i % 5 == 0};
      } else {
        run.options = AdamOptions{
            .lr = 0.1 * i, .weight_decay = i % 3 * 0.1, .step = 1 + i % 4, .amsgrad = i % 2 == 0};
      }
      launched.runs.push_back(run);
      end = run.end + generator() % 40;  // gaps that nothing may touch
      state += run.end - run.begin + generator() % 3;
    }
    const Flat<TypeParam> before(end);
    for (const std::int64_t num_blocks : {1, 2, 7, 500}) {
      launched.num_blocks = num_blocks;
      check(before, launched, false);
      check(before, launched, true);
    }
  }
}

TEST(StepKernelTable, IsReadAgainByEveryLaunch) {
  const AdamOptions first{.lr = 0.1, .step = 1}, second{.lr = 0.05, .step = 2};
  Flat<PlainWeights<float>> actual(5000), expected(actual, false);
  std::vector<std::byte> table =
      step_table(StepRule::kAdam, WeightsKind::kFloat, one_run(5000, first), 1);
  const StepLaunch recorded{.rule = StepRule::kAdam,
                            .kind = WeightsKind::kFloat,
                            .w = actual.w.data(),
                            .w_out = actual.w_out(),
                            .master = nullptr,
                            .g = actual.g.data(),
                            .state = {actual.state0.data(), actual.state1.data(), nullptr},
                            .table = table.data(),
                            .num_chunks = 2};
  step_on_host(recorded, 2);
  const std::vector<std::byte> next =
      step_table(StepRule::kAdam, WeightsKind::kFloat, one_run(5000, second), 0.25);
  ASSERT_EQ(next.size(), table.size());
  std::memcpy(table.data(), next.data(), next.size());
  step_on_host(recorded, 2);
  step_on_cpu(expected, one_run(5000, first)[0], 1);
  const std::vector<float> g(expected.g.data(), expected.g.data() + 5000);
  step_on_cpu(expected, one_run(5000, second)[0], 0.25);
  std::memcpy(expected.g.data(), g.data(), 5000 * sizeof(float));
  actual.expect_equal(expected);
}

// Norms.

template <typename T>
struct Given {
  std::vector<Array<T>> arrays;
  std::vector<NormArray> table;
  std::int64_t num_chunks = 0;

  Given(const std::vector<std::size_t>& sizes, std::size_t offset, double scale = 1) {
    arrays.reserve(sizes.size());
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      const auto n = static_cast<std::int64_t>(sizes[i]);
      arrays.emplace_back(sizes[i], offset * (i + 1), static_cast<unsigned>(i), scale);
      table.push_back({arrays.back().data(), n, num_chunks});
      num_chunks += (n + kNormChunk - 1) / kNormChunk;
    }
  }
  std::vector<double> norms(NormKind kind, std::int64_t num_blocks) const {
    std::vector<double> partials(num_chunks), norms(arrays.size(), -1);
    norms_on_host(
        {kind, sizeof(T) == 8 ? Numbers::kDouble : Numbers::kFloat, table.data(),
         static_cast<std::int64_t>(table.size()), num_chunks, partials.data(), norms.data()},
        num_blocks);
    return norms;
  }
};

template <typename T>
double norm_by_definition(const Array<T>& numbers, NormKind kind) {
  long double sum = 0;
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    const long double x = std::abs(static_cast<long double>(numbers.data()[i]));
    if (kind == NormKind::kMax) {
      sum = std::max(sum, x);
    } else {
      sum += kind == NormKind::kTwo ? x * x : x;
    }
  }
  return static_cast<double>(kind == NormKind::kTwo ? std::sqrt(sum) : sum);
}

template <typename T>
class NormKernel : public ::testing::Test {};
using EveryType = ::testing::Types<float, double>;
TYPED_TEST_SUITE(NormKernel, EveryType);

TYPED_TEST(NormKernel, EqualsTheDefinitionToTheLastBitsOfTheType) {
  std::vector<std::size_t> sizes{0, 16384, 16385, 70'003, 5'000'000};
  for (std::size_t n = 1; n <= 4097; n += n < 40 || n > 4090 ? 1 : 173) sizes.push_back(n);
  const Given<TypeParam> given(sizes, 0);
  for (const NormKind kind : {NormKind::kOne, NormKind::kTwo, NormKind::kMax}) {
    const std::vector<double> norms = given.norms(kind, 5);
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      const double expected = norm_by_definition(given.arrays[i], kind);
      const double ulp = std::numeric_limits<TypeParam>::epsilon() * expected;
      EXPECT_NEAR(norms[i], expected, sizeof(TypeParam) == 4 ? 0.51 * ulp : 8 * ulp) << sizes[i];
      EXPECT_EQ(norms[i], static_cast<TypeParam>(norms[i]));
    }
  }
}

TYPED_TEST(NormKernel, HasTheSameBitsForAnyNumberOfBlocksAndAlignment) {
  const std::vector<std::size_t> sizes{3, 1000, 16384 * 5 + 7, 4097, 1, 100'000};
  for (const NormKind kind : {NormKind::kOne, NormKind::kTwo, NormKind::kMax}) {
    const std::vector<double> expected = Given<TypeParam>(sizes, 0).norms(kind, 1);
    for (const std::size_t offset : {0, 1, 3}) {
      for (const std::int64_t num_blocks : {2, 3, 100}) {
        EXPECT_EQ(Given<TypeParam>(sizes, offset).norms(kind, num_blocks), expected);
      }
    }
  }
}

TYPED_TEST(NormKernel, IsInfiniteOrNotANumberWhereAnElementIs) {
  for (const std::size_t at : {0, 255, 1024, 16383, 16384, 40'000}) {
    for (const TypeParam bad :
         {std::numeric_limits<TypeParam>::infinity(), -std::numeric_limits<TypeParam>::infinity(),
          std::numeric_limits<TypeParam>::quiet_NaN()}) {
      Given<TypeParam> given({40'001, 10}, 0);
      given.arrays[0].data()[at] = bad;
      for (const NormKind kind : {NormKind::kOne, NormKind::kTwo, NormKind::kMax}) {
        const std::vector<double> norms = given.norms(kind, 4);
        EXPECT_TRUE(std::isnan(bad) ? std::isnan(norms[0]) : std::isinf(norms[0]));
        EXPECT_TRUE(std::isfinite(norms[1]));
      }
    }
  }
}

TEST(NormKernelOfFloat, IsFiniteWhereSquaresOverflowFloat) {
  const Given<float> given({1000}, 0, 1e30);
  EXPECT_NEAR(
      given.norms(NormKind::kTwo, 1)[0] / norm_by_definition(given.arrays[0], NormKind::kTwo), 1,
      1e-7);
}

// Another number of threads' sums than of float32, and so another order, but in double.
TEST(NormKernelOfBfloat16, IsTheNormOfTheFloat32ThatTheNumbersAre) {
  for (const std::size_t n : {1, 7, 8, 9, 4096, 16384, 16385, 70'003}) {
    Array<float> wide(n, 0, 3);
    Array<std::uint16_t> narrow(n, 1, 0);
    for (std::size_t i = 0; i < n; ++i) {
      narrow.data()[i] = bfloat16_bits(wide.data()[i]);
      wide.data()[i] = float_of_bfloat16(narrow.data()[i]);
    }
    const NormArray array{narrow.data(), static_cast<std::int64_t>(n), 0};
    const std::int64_t num_chunks = (array.n + kNormChunk - 1) / kNormChunk;
    for (const NormKind kind : {NormKind::kOne, NormKind::kTwo, NormKind::kMax}) {
      std::vector<double> partials(num_chunks), norm(1, -1);
      norms_on_host({kind, Numbers::kBfloat16, &array, 1, num_chunks, partials.data(), norm.data()},
                    3);
      const double expected = norm_by_definition(wide, kind);
      EXPECT_NEAR(norm[0], expected, 0.51 * std::numeric_limits<float>::epsilon() * expected) << n;
      EXPECT_EQ(norm[0], static_cast<float>(norm[0]));
    }
  }
}

}  // namespace
}  // namespace pd2::kernels
