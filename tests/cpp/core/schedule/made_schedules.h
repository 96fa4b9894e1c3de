// Every schedule that can be made of some sizes.

#pragma once

#include "core/check.h"
#include "core/schedule/generate.h"
#include "core/schedule/methods.h"

#include <string>
#include <string_view>
#include <vector>

namespace pd2::testing {

// The fewest that the method allows.
inline int least_stages_per_rank(std::string_view name) {
  return find_method(name)->is_v() ? 2 : 1;
}

// All names, up to max_stages stages, all divisors as stages per rank, up to max_microbatches.
inline std::vector<Schedule> made_schedules(int max_stages, int max_microbatches) {
  std::vector<Schedule> schedules;
  for (const std::string& name : schedule_names()) {
    for (int d = 1; d <= max_stages; ++d) {
      for (int v = 1; v <= d; ++v) {
        for (int m = 1; m <= max_microbatches; ++m) {
          try {
            schedules.push_back(make_schedule(name, d, m, v));
          } catch (const ValueError&) {
          }
        }
      }
    }
  }
  return schedules;
}

}  // namespace pd2::testing
