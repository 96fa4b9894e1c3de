// How devices come to rest when a pipeline has failed.
#pragma once

#include "engine/run/stage_worker.h"

#include <chrono>
#include <memory>
#include <vector>

namespace pd2 {

// Waits until the stages' devices have done what they were given, until then at most, and notes
// which updates are right (see DeviceWork). What still waits for other processes then is cut off.
// Once the channels were aborted; from any thread. Stages on the CPU have nothing to wait for.
void come_to_rest(const std::vector<std::unique_ptr<StageWorker>>& workers,
                  std::chrono::steady_clock::time_point until);

}  // namespace pd2
