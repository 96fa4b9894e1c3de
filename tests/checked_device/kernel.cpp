#include "checked_device/kernel.h"

#include "checked_device/allocator.h"
#include "checked_device/graph.h"
#include "checked_device/runtime.h"
#include "checked_device/streams.h"

#include <stdexcept>
#include <vector>

namespace pd2 {

void access(std::span<const KernelUse> uses, const std::string& name) {
  int device = -1;
  std::vector<Use> checked;
  for (const auto& [begin, bytes, is_write] : uses) {
    if (bytes == 0) continue;
    const int found = device_of_memory(begin);
    if (found < 0 || (device >= 0 && found != device)) {
      throw std::invalid_argument(name + ": memory of device " + std::to_string(found) +
                                  " beside device " + std::to_string(device));
    }
    device = found;
    checked.push_back({reinterpret_cast<Address>(begin), bytes, is_write});
  }
  if (device >= 0) GraphRecording::refuse(current_stream_number(device), name);
  if (device >= 0) Runtime::instance().launch(current_stream_number(device), name, checked);
}

}  // namespace pd2
