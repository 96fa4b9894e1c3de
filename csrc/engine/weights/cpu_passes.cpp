#include "engine/weights/device_passes.h"
#include "kernels/cpu/step.h"
#include "kernels/half.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <variant>

namespace pd2 {
namespace {

constexpr std::int64_t kLineBytes = 64;
// Per thread; below this, starting threads costs more than they save.
constexpr std::int64_t kGrainBytes = std::int64_t{1} << 20;
// Elements of the gradient that are still in the cache when they are read after having been scaled.
constexpr std::int64_t kScaledAtOnce = std::int64_t{1} << 16;

template <typename T>
void scale(T* g, std::int64_t n, T by) {
  for (std::int64_t i = 0; i < n; ++i) g[i] *= by;
}
void scale(std::uint16_t* g, std::int64_t n, float by) {
  for (std::int64_t i = 0; i < n; ++i) {
    g[i] = kernels::bfloat16_bits(kernels::float_of_bfloat16(g[i]) * by);
  }
}

template <typename Weights, typename Fed>
void step_fed(const Weights& weights, const FlatStep& step, const kernels::StepOfRun& run,
              std::int64_t begin, std::int64_t end, const Fed& feedback) {
  using T = typename Weights::Scalar;
  const auto* g = static_cast<const typename Weights::Gradient*>(step.arrays.g) + begin;
  kernels::State<T> state{};
  for (std::size_t i = 0; i < std::size(state.arrays); ++i) {
    if (void* array = step.arrays.state[i]) {
      state.arrays[i] = static_cast<T*>(array) + run.state + begin - run.begin;
    }
  }
  const auto take = [&](const auto& options) {
    kernels::step_cpu(weights.at(begin), g, state, end - begin, options, feedback);
  };
  if (const auto* sgd = std::get_if<kernels::SgdOptions>(&run.options)) {
    take(*sgd);
  } else {
    take(std::get<kernels::AdamOptions>(run.options));
  }
}

template <typename Weights>
void step_part(const Weights& weights, const FlatStep& step, const kernels::StepOfRun& run,
               std::int64_t begin, std::int64_t end) {
  if (!run.feedback) {
    return step_fed(weights, step, run, begin, end, kernels::NoFeedback());
  }
  using T = typename Weights::Scalar;
  T* kept = static_cast<T*>(step.arrays.kept);
  if (kept != nullptr) kept += run.state + begin - run.begin;
  step_fed(weights, step, run, begin, end, kernels::Feedback<T>{kept, *run.feedback});
}

template <typename Weights>
void step_piece(const Weights& weights, const FlatStep& step, const kernels::StepOfRun& run,
                std::int64_t begin, std::int64_t end) {
  using T = typename Weights::Scalar;
  using Out = typename Weights::Out;
  if (std::holds_alternative<std::monostate>(run.options)) {
    const Out* w = static_cast<const Out*>(step.arrays.w);
    if (w != weights.w_out) {
      std::memcpy(weights.w_out + begin, w + begin, (end - begin) * sizeof(Out));
    }
    return;
  }
  if (step.gradient_scale == 1) {
    return step_part(weights, step, run, begin, end);
  }
  auto* g = static_cast<typename Weights::Gradient*>(step.gradient);
  for (; begin < end; begin += kScaledAtOnce) {
    const std::int64_t part_end = std::min(end, begin + kScaledAtOnce);
    scale(g + begin, part_end - begin, static_cast<T>(step.gradient_scale));
    step_part(weights, step, run, begin, part_end);
  }
}

// Threads share the runs out by cache lines, so that every piece begins on a 64-byte boundary.
template <typename Weights>
void step_weights(const Weights& weights, const FlatStep& step) {
  constexpr std::int64_t kLine =
      kLineBytes / static_cast<std::int64_t>(sizeof(typename Weights::Out));
  const auto lines = [](const kernels::StepOfRun& run) {
    return (run.end - run.begin + kLine - 1) / kLine;
  };
  std::vector<std::int64_t> first_line;  // of each run, counting the runs' lines only
  std::int64_t num_lines = 0;
  for (const kernels::StepOfRun& run : step.runs) {
    first_line.push_back(num_lines);
    num_lines += lines(run);
  }
  at::parallel_for(
      0, num_lines, kGrainBytes / kLineBytes, [&](std::int64_t line, std::int64_t end_line) {
        auto r = std::upper_bound(first_line.begin(), first_line.end(), line) - first_line.begin();
        for (--r; line < end_line; ++r) {
          const kernels::StepOfRun& run = step.runs[r];
          const std::int64_t begin = run.begin + (line - first_line[r]) * kLine;
          const std::int64_t limit = run.begin + (end_line - first_line[r]) * kLine;
          step_piece(weights, step, run, begin, std::min(run.end, limit));
          line = first_line[r] + lines(run);
        }
      });
}

void step_on_cpu(const FlatStep& step, const at::Tensor&) {
  kernels::visit_weights(step.arrays, [&](const auto& weights) { step_weights(weights, step); });
}

[[maybe_unused]] const bool kCpusAreThere = [] {
  by_device_type<DevicePasses>().set(c10::DeviceType::CPU, cpu_passes());
  return true;
}();

}  // namespace

DevicePasses cpu_passes() {
  return {[](const FlatStep&, at::Tensor&) {}, &step_on_cpu, /*norms=*/nullptr};
}

}  // namespace pd2
