// What one launch of an optimizer's step does, as bytes for the device's memory. Whatever changes
// from step to step is in there and not in the launch's arguments, so that a recorded launch can be
// replayed with another table in the same place.
#pragma once

#include "kernels/grid/launch.h"
#include "kernels/optimizer.h"
#include "kernels/optimizer_steps.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <variant>
#include <vector>

namespace pd2::kernels {

// Elements: 16 bytes of floats for each thread of a block. On an H200 longer chunks were slower.
constexpr std::int64_t kStepChunk = 1024;

// The table begins with this, and the runs follow.
struct StepControl {
  double gradient_scale = 1;  // gradients are multiplied by it first, as clipping does
  std::int64_t num_chunks = 0;
  std::int32_t num_runs = 0;
};

// Elements of the flat arrays that are stepped alike; `Step` holds the coefficients.
template <typename Step>
struct StepRun {
  std::int64_t begin, end;
  std::int64_t state;  // where they begin in the arrays of state
  std::int64_t first_chunk;
  std::int32_t num_states;  // that the step uses; kCopied: the weights are copied instead
  bool is_fed;
  Step step;
  FeedbackStep<typename Step::Vector> feedback;
};
constexpr std::int32_t kCopied = -1;

struct StepOfRun {
  std::int64_t begin = 0, end = 0, state = 0;
  std::variant<std::monostate, SgdOptions, AdamOptions> options{};  // none: copied
  std::optional<FeedbackOptions> feedback{};
};

// The runs' options are all the rule's, or none. The runs' order does not matter.
std::vector<std::byte> step_table(StepRule rule, WeightsKind kind, std::span<const StepOfRun> runs,
                                  double gradient_scale);

}  // namespace pd2::kernels
