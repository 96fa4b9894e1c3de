#include "engine/channels/device_memory_sharing.h"

#include "engine/by_device_type.h"

namespace pd2 {
namespace {

ByDeviceType<DeviceMemorySharing>& table() {
  static ByDeviceType<DeviceMemorySharing> one;
  return one;
}

}  // namespace

void register_device_memory_sharing(c10::DeviceType type, const DeviceMemorySharing& sharing) {
  table().set(type, sharing);
}

const DeviceMemorySharing* find_device_memory_sharing(c10::DeviceType type) {
  return table().find(type);
}

}  // namespace pd2
