// An action as torch.profiler shows it.
#pragma once

#include "core/schedule/schedule.h"

#include <ATen/record_function.h>

#include <cstdint>

namespace pd2 {

// While it lives, profilers that record this thread show a range: "pd2 stage 1 forward batch 3
// microbatch 2 version 2". If none records, it costs one look at the thread's callbacks.
class ActionRange {
 public:
  ActionRange(int stage, ActionKind kind, std::int64_t batch, int microbatch, std::int64_t version);
  // The range of an evaluation.
  ActionRange(int stage, int microbatch, std::int64_t version);

 private:
  at::RecordFunction range_{at::RecordScope::USER_SCOPE};
};

}  // namespace pd2
