#include "kernels/grid/step_table.h"

#include "kernels/grid/grid.h"
#include "kernels/grid/number.h"

#include <cstring>
#include <type_traits>

namespace pd2::kernels {
namespace {

template <typename Step>
std::vector<std::byte> table(std::span<const StepOfRun> runs, double gradient_scale) {
  using Options = typename Step::Options;
  static_assert(std::is_trivially_copyable_v<StepRun<Step>>);
  static_assert(sizeof(StepControl) % alignof(StepRun<Step>) == 0);
  std::vector<std::byte> bytes(sizeof(StepControl) + runs.size() * sizeof(StepRun<Step>));
  std::byte* end = bytes.data() + sizeof(StepControl);
  StepControl control{.gradient_scale = gradient_scale,
                      .num_runs = static_cast<std::int32_t>(runs.size())};
  for (const StepOfRun& given : runs) {
    const auto* options = std::get_if<Options>(&given.options);
    const StepRun<Step> run{
        given.begin,
        given.end,
        given.state,
        control.num_chunks,
        options == nullptr ? kCopied : Step::num_states(*options),
        given.feedback.has_value(),
        Step(options == nullptr ? Options() : *options),
        FeedbackStep<typename Step::Vector>(given.feedback.value_or(FeedbackOptions()))};
    std::memcpy(end, &run, sizeof(run));
    end += sizeof(run);
    control.num_chunks += num_chunks(given.end - given.begin, kStepChunk);
  }
  std::memcpy(bytes.data(), &control, sizeof(control));
  return bytes;
}

template <typename T>
std::vector<std::byte> table(StepRule rule, std::span<const StepOfRun> runs,
                             double gradient_scale) {
  return rule == StepRule::kSgd ? table<SgdStep<Number<T>>>(runs, gradient_scale)
                                : table<AdamStep<Number<T>>>(runs, gradient_scale);
}

}  // namespace

std::vector<std::byte> step_table(StepRule rule, WeightsKind kind, std::span<const StepOfRun> runs,
                                  double gradient_scale) {
  return kind == WeightsKind::kDouble ? table<double>(rule, runs, gradient_scale)
                                      : table<float>(rule, runs, gradient_scale);
}

}  // namespace pd2::kernels
