// The optimizer's passes on the CPU, shared out to threads.
#pragma once

#include "engine/weights/device_passes.h"

namespace pd2 {

DevicePasses cpu_passes();

}  // namespace pd2
