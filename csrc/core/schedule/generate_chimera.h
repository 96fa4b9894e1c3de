// Chimera: two pipelines over one model, in opposite directions (arXiv 2107.06925).
//
// Time in slots, each as long as a backward. A unit is, on stage i of either pipeline,
//
//   F of its q-th forward slot at  i + 2 q                   q = 0 .. d/2 - 1
//   B of its n-th microbatch at    d + 2 n + (d - 1 - i)     n = 0, 1, ...
//
// with one microbatch in a forward slot (then a unit has d microbatches, d/2 a pipeline, and 2 d
// slots), or with two (forward doubling, section 3.5: 2 d microbatches and 3 d slots, without
// bubbles inside where a backward takes twice a forward). Units follow each other without a gap: a
// unit's first forwards fall into the last one's bubbles.

#pragma once

#include "core/schedule/schedule.h"

#include <string_view>

namespace pd2 {

// `num_microbatches`: of the batch. Of microbatches that fill no unit of 2 d the last d (or fewer)
// make one without doubling, as in the paper. d and m must be even.
Schedule make_chimera(std::string_view name, int depth, int num_microbatches,
                      int microbatches_per_forward_slot);

}  // namespace pd2
