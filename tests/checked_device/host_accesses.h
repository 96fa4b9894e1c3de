#pragma once

namespace pd2 {

// From now on looks at the operators of the CPU that use pinned memory. An error is raised by the
// next launch or wait: torch gives no way to raise it in the operator.
void check_host_accesses();

}  // namespace pd2
