#pragma once

#include <limits>

namespace pd2 {

// Above every time and every size.
inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

}  // namespace pd2
