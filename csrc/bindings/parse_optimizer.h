// The fused optimizers by the names that Python gives them.
#pragma once

#include "engine/weights/fused_optimizer.h"

#include <string>

namespace pd2 {

// Throws ValueError unless the kind is "sgd" or "adam".
OptimizerKind parse_optimizer(const std::string& kind);

}  // namespace pd2
