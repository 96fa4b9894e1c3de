// A schedule as text for people: ranks as rows, the lists side by side in order, cells marked.

#pragma once

#include "core/schedule/unroll.h"

#include <string>
#include <vector>

namespace pd2 {

struct Mark {
  Cell cell;
  // Shown after the row's last action instead of an action: what is missing there ("2B3?").
  // The cell's index is not used then.
  std::string missing = {};
};

// The lists with a column per position; marked cells look like >2B0<. Of long lists only the
// columns around the first mark are shown.
std::string grid(const Schedule& schedule, const std::vector<Mark>& marks);

}  // namespace pd2
