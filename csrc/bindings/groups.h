// Process groups by the names that Python knows them by.
#pragma once

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <string>

namespace pd2 {

// None for an empty name.
inline c10::intrusive_ptr<c10d::ProcessGroup> resolve_group(const std::string& name) {
  return name.empty() ? nullptr : c10d::resolve_process_group(name);
}

}  // namespace pd2
