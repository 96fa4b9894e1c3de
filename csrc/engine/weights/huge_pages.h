// Memory for flat buffers that every step walks through from end to end.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace pd2 {

// at::zeros({numel}, options), on 2 MiB pages where the system grants them on request (Linux with
// transparent huge pages): an optimizer step walks through five such buffers at once, and with 4
// KiB pages its address translations alone cost about a tenth of its time.
at::Tensor zeros_on_huge_pages(std::int64_t numel, const at::TensorOptions& options);

}  // namespace pd2
