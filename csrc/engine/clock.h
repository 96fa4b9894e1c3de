// The clock of logs and timelines.
#pragma once

#include <chrono>

namespace pd2 {

// Seconds; all processes of a machine share the clock.
inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace pd2
