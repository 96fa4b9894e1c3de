// The end of a process group, which nobody has to wait for.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace pd2 {

// Releases a reference to a group. With the last one the group ends, and gloo's waits then for
// collectives that have begun: where another process is stopped, up to their timeout. That may
// follow other waits for the same process, so after a moment the group is left to a thread.
void release_group(c10::intrusive_ptr<c10d::ProcessGroup>& group);

}  // namespace pd2
