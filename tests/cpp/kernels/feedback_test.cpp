// Steps with error feedback: a plain step, and then the definition, element by element.
#include "checked_device/host_grid.h"
#include "kernels/cpu/instruction_set.h"
#include "kernels/cpu/step.h"
#include "kernels/half.h"
#include "kernels/optimizer.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <new>
#include <random>
#include <type_traits>
#include <vector>

namespace pd2::kernels {
namespace {

constexpr double kCoefficient = 0.7;
const std::vector<std::size_t> kLengths{0, 1, 8, 31, 77, 130, 70'003};  // the last is streamed

// What may be streamed to begins on a boundary.
template <typename T>
struct OnBoundary {
  using value_type = T;
  static constexpr std::align_val_t kBoundary{64};
  T* allocate(std::size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), kBoundary)); }
  void deallocate(T* p, std::size_t) { ::operator delete(p, kBoundary); }
  bool operator==(const OnBoundary&) const { return true; }
};
template <typename T>
using Array = std::vector<T, OnBoundary<T>>;

// The arrays of one kind of weights. Masters and weights are not independent: only what the kind
// reads counts.
template <typename Weights>
struct OfKind {
  using T = typename Weights::Scalar;
  using Out = typename Weights::Out;
  using Gradient = typename Weights::Gradient;
  static constexpr bool kIsPlain = std::is_same_v<T, Out>;
  static constexpr bool kIsSplit = std::is_base_of_v<SplitWeights, Weights>;

  explicit OfKind(std::size_t n)
      : w(n), master(n), out(n), state0(n), state1(n), remainder(n), g(n), kept(n) {
    std::mt19937 generator(static_cast<unsigned>(n));
    std::normal_distribution<double> normal;
    for (std::size_t i = 0; i < n; ++i) {
      master[i] = static_cast<T>(normal(generator));
      if constexpr (kIsPlain) {
        w[i] = master[i];
      } else {
        const SplitFloat parts = split(master[i]);
        w[i] = parts.high, remainder[i] = parts.remainder;
      }
      const double gradient = normal(generator);
      if constexpr (std::is_same_v<Gradient, T>) {
        g[i] = static_cast<T>(gradient);
      } else {
        g[i] = bfloat16_bits(static_cast<float>(gradient));
      }
      state0[i] = static_cast<T>(normal(generator));
      state1[i] = static_cast<T>(gradient * gradient);
      kept[i] = static_cast<T>(0.1 * normal(generator));
    }
  }

  Weights weights(bool in_place) {
    Out* to = in_place ? w.data() : out.data();
    if constexpr (kIsPlain) {
      return {w.data(), to};
    } else if constexpr (kIsSplit && !std::is_same_v<Gradient, T>) {
      return {{w.data(), remainder.data(), to}};
    } else if constexpr (kIsSplit) {
      return {w.data(), remainder.data(), to};
    } else if constexpr (!std::is_same_v<Gradient, T>) {
      return {{master.data(), to}};
    } else {
      return {master.data(), to};
    }
  }
  // The float32 or float64 value of the newest weights.
  std::vector<T> values(bool in_place) const {
    const Array<Out>& weights = in_place ? w : out;
    std::vector<T> found(master);
    for (std::size_t i = 0; i < w.size(); ++i) {
      if constexpr (kIsPlain) {
        found[i] = weights[i];
      } else if constexpr (kIsSplit) {
        found[i] = join({weights[i], remainder[i]});
      }
    }
    return found;
  }
  // What the versions have of a value.
  static Out rounded(T value) {
    if constexpr (kIsPlain) {
      return value;
    } else if constexpr (kIsSplit) {
      return split(value).high;
    } else if constexpr (std::is_same_v<Weights, MasterWeights<HalfFormat::kFloat16>>) {
      return float16_bits(value);
    } else {
      return bfloat16_bits(value);
    }
  }

  Array<Out> w;
  std::vector<T> master;
  Array<Out> out;
  std::vector<T> state0, state1;
  std::vector<std::int16_t> remainder;
  std::vector<Gradient> g;
  std::vector<T> kept;
};

enum class Rule { kSgd, kMomentum, kAdam };
const SgdOptions kMomentum{.lr = 0.03, .momentum = 0.9, .weight_decay = 0.1};
const AdamOptions kAdam{.lr = 0.01, .weight_decay = 0.1, .step = 3, .decoupled_weight_decay = true};

template <typename Weights, typename Fed = NoFeedback>
void step_on_cpu(OfKind<Weights>& a, Rule rule, bool in_place, const Fed& fed = {}) {
  const auto n = static_cast<std::int64_t>(a.w.size());
  if (rule == Rule::kAdam) {
    step_cpu(a.weights(in_place), a.g.data(), {a.state0.data(), a.state1.data()}, n, kAdam, fed);
  } else {
    step_cpu(a.weights(in_place), a.g.data(), {a.state0.data()}, n,
             rule == Rule::kMomentum ? kMomentum : SgdOptions{.lr = 0.1}, fed);
  }
}

template <typename Weights>
WeightsKind kind_of() {
  if (std::is_same_v<Weights, PlainWeights<float>>) return WeightsKind::kFloat;
  if (std::is_same_v<Weights, PlainWeights<double>>) return WeightsKind::kDouble;
  if (std::is_base_of_v<SplitWeights, Weights>) return WeightsKind::kSplit;
  return std::is_same_v<Weights, MasterWeights<HalfFormat::kFloat16>>
             ? WeightsKind::kFloat16Master
             : WeightsKind::kBfloat16Master;
}

// In two runs, the second of which has no feedback from `fed` elements on.
template <typename Weights>
void step_by_grid(OfKind<Weights>& a, Rule rule, bool in_place, const FeedbackOptions& options,
                  std::int64_t fed) {
  using T = typename Weights::Scalar;
  const auto n = static_cast<std::int64_t>(a.w.size());
  const auto chosen = [&]() -> decltype(StepOfRun::options) {
    if (rule == Rule::kAdam) return kAdam;
    return rule == Rule::kMomentum ? kMomentum : SgdOptions{.lr = 0.1};
  }();
  const std::vector<StepOfRun> runs{
      {.begin = 0, .end = fed, .state = 0, .options = chosen, .feedback = options},
      {.begin = fed, .end = n, .state = fed, .options = chosen}};
  const StepRule step_rule = rule == Rule::kAdam ? StepRule::kAdam : StepRule::kSgd;
  const auto table = step_table(step_rule, kind_of<Weights>(), runs, 1);
  step_on_host({.rule = step_rule,
                .kind = kind_of<Weights>(),
                .w = a.w.data(),
                .w_out = in_place ? a.w.data() : a.out.data(),
                .master = OfKind<Weights>::kIsSplit ? static_cast<void*>(a.remainder.data())
                                                    : a.master.data(),
                .g = a.g.data(),
                .has_bfloat16_gradients = !std::is_same_v<typename Weights::Gradient, T>,
                .state = {a.state0.data(), a.state1.data(), nullptr},
                .is_fed = true,
                .kept = HasMaster<Weights> ? nullptr : a.kept.data(),
                .table = table.data(),
                .num_chunks = 1},
               3);
}

template <typename Numbers>
void expect_same(const Numbers& actual, const Numbers& expected, const char* what) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    ASSERT_EQ(std::memcmp(&actual[i], &expected[i], sizeof(actual[i])), 0)
        << what << ", element " << i << " of " << actual.size() << ": " << actual[i]
        << ", expected " << expected[i];
  }
}

// The definition, after a plain step.
template <typename Weights>
void feed_back(const OfKind<Weights>& before, OfKind<Weights>& a, bool in_place,
               const FeedbackOptions& options, std::size_t fed) {
  using T = typename Weights::Scalar;
  const std::vector<T> old = before.values(/*in_place=*/true);
  const std::vector<T> stepped = a.values(in_place);
  auto& weights = in_place ? a.w : a.out;
  for (std::size_t i = 0; i < fed; ++i) {
    const T step = stepped[i] - old[i];
    const auto coefficient = static_cast<T>(options.coefficient);
    if constexpr (HasMaster<Weights>) {
      const T change = step * coefficient;
      weights[i] = OfKind<Weights>::rounded(stepped[i] + change);
      continue;
    }
    T corrected = stepped[i];
    if (!options.first_step) {
      const T error = step - a.kept[i];
      const T change = error * coefficient;
      corrected = stepped[i] + change;
    }
    a.kept[i] = step;
    weights[i] = OfKind<Weights>::rounded(corrected);
    if constexpr (OfKind<Weights>::kIsSplit) a.remainder[i] = split(corrected).remainder;
  }
}

template <typename Weights>
void check(bool on_grid) {
  for (const std::size_t n : kLengths) {
    for (const Rule rule : {Rule::kSgd, Rule::kMomentum, Rule::kAdam}) {
      for (const bool in_place : {false, true}) {
        for (const bool first_step : {false, true}) {
          if (n > 1'000 && (rule != Rule::kAdam || first_step)) continue;  // seconds
          const FeedbackOptions options{kCoefficient, first_step};
          const OfKind<Weights> before(n);
          OfKind<Weights> actual = before, expected = before;
          const std::size_t fed = on_grid ? n - n / 3 : n;
          if (on_grid) {
            step_by_grid(actual, rule, in_place, options, static_cast<std::int64_t>(fed));
          } else {
            auto* kept = HasMaster<Weights> ? nullptr : actual.kept.data();
            step_on_cpu(actual, rule, in_place, Feedback<typename Weights::Scalar>{kept, options});
          }
          step_on_cpu(expected, rule, in_place);
          feed_back(before, expected, in_place, options, fed);
          expect_same(actual.w, expected.w, "weights");
          expect_same(actual.out, expected.out, "new weights");
          expect_same(actual.master, expected.master, "master");
          expect_same(actual.remainder, expected.remainder, "remainder");
          expect_same(actual.state0, expected.state0, "state 0");
          expect_same(actual.state1, expected.state1, "state 1");
          expect_same(actual.kept, expected.kept, "kept");
        }
      }
    }
  }
}

void check_every_kind(bool on_grid) {
  check<PlainWeights<float>>(on_grid);
  check<PlainWeights<double>>(on_grid);
  check<MasterWeights<HalfFormat::kBfloat16>>(on_grid);
  check<MasterWeights<HalfFormat::kFloat16>>(on_grid);
  check<SplitWeights>(on_grid);
  check<Bfloat16Gradients<MasterWeights<HalfFormat::kBfloat16>>>(on_grid);
  check<Bfloat16Gradients<SplitWeights>>(on_grid);
}

class FeedbackPass : public ::testing::TestWithParam<InstructionSet> {
 protected:
  void SetUp() override {
    if (!is_supported(GetParam())) GTEST_SKIP() << "not supported by this machine";
    set_instruction_set(GetParam());
  }
  void TearDown() override { set_instruction_set(before_); }

 private:
  InstructionSet before_ = instruction_set();
};

INSTANTIATE_TEST_SUITE_P(EveryInstructionSet, FeedbackPass,
                         ::testing::Values(InstructionSet::kPortable, InstructionSet::kAvx2,
                                           InstructionSet::kAvx512));

TEST_P(FeedbackPass, IsAPlainStepAndTheDefinition) { check_every_kind(/*on_grid=*/false); }

TEST(FeedbackOnAGrid, IsAPlainStepAndTheDefinition) { check_every_kind(/*on_grid=*/true); }

}  // namespace
}  // namespace pd2::kernels
