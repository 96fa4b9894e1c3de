#pragma once

namespace pd2 {

// Tells torch of the devices, their streams, events and generators, and of pinned memory.
void register_hooks();

}  // namespace pd2
