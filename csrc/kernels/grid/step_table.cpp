#include "kernels/grid/step_table.h"

#include "kernels/grid/grid.h"
#include "kernels/grid/number.h"
#include "kernels/optimizer_steps.h"

#include <cstring>
#include <type_traits>

namespace pd2::kernels {
namespace {

std::int32_t num_states(const SgdOptions& options) { return options.momentum != 0.0 ? 1 : 0; }
std::int32_t num_states(const AdamOptions& options) { return options.amsgrad ? 3 : 2; }

template <typename Step, typename Options>
std::vector<std::byte> table(std::span<const StepOfRun> runs, double gradient_scale) {
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
        options == nullptr ? kCopied : num_states(*options),
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

}  // namespace

template <typename T>
std::vector<std::byte> sgd_table(std::span<const StepOfRun> runs, double gradient_scale) {
  return table<SgdStep<Number<T>>, SgdOptions>(runs, gradient_scale);
}
template <typename T>
std::vector<std::byte> adam_table(std::span<const StepOfRun> runs, double gradient_scale) {
  return table<AdamStep<Number<T>>, AdamOptions>(runs, gradient_scale);
}

template std::vector<std::byte> sgd_table<float>(std::span<const StepOfRun>, double);
template std::vector<std::byte> sgd_table<double>(std::span<const StepOfRun>, double);
template std::vector<std::byte> adam_table<float>(std::span<const StepOfRun>, double);
template std::vector<std::byte> adam_table<double>(std::span<const StepOfRun>, double);

}  // namespace pd2::kernels
