// Memory of the checked device that two processes use.

#pragma once

#include "engine/channels/device_memory_sharing.h"

#include <chrono>

namespace pd2 {

// A thread of each stream makes its copies and waits for its words, later than they are given: what
// is not waited for is not there yet.
const DeviceMemorySharing& checked_memory_sharing();

// How long each copy takes.
void set_sharing_delay(std::chrono::duration<double> delay);

}  // namespace pd2
