// The optimizer's passes on the checked device: the kernels' own bodies, thread by thread.
#pragma once

#include "engine/weights/device_passes.h"

namespace pd2 {

const DevicePasses& checked_passes();

}  // namespace pd2
