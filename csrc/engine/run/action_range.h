// Shows what a stage does in torch's profiler.
#pragma once

#include "core/check.h"
#include "engine/run/run.h"

#include <ATen/record_function.h>

#include <cstdint>
#include <string>

namespace pd2 {

// While it lives, profilers that record this thread show a range: "pd2 stage 1 forward batch 3
// microbatch 2 version 2". If none records, it costs one look at the thread's callbacks.
class ActionRange {
 public:
  explicit ActionRange(const ExecutedAction& action) {
    if (range_.isActive()) {
      const std::string microbatch = action.kind == ActionKind::kUpdate
                                         ? std::string()
                                         : detail::concat(" microbatch ", action.microbatch);
      range_.before(detail::concat("pd2 stage ", action.stage, " ", name_of(action.kind), " batch ",
                                   action.run, microbatch, " version ", action.version));
    }
  }
  // The range of an evaluation.
  ActionRange(int stage, int microbatch, std::int64_t version) {
    if (range_.isActive()) {
      range_.before(detail::concat("pd2 stage ", stage, " evaluation microbatch ", microbatch,
                                   " version ", version));
    }
  }

 private:
  at::RecordFunction range_{at::RecordScope::USER_SCOPE};
};

}  // namespace pd2
