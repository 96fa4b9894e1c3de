#include "engine/weights/device_passes.h"

#include "engine/by_device_type.h"
#include "engine/weights/cpu_passes.h"

namespace pd2 {
namespace {

ByDeviceType<DevicePasses>& table() {
  static auto* const one = [] {
    auto* const made = new ByDeviceType<DevicePasses>;
    made->set(c10::DeviceType::CPU, cpu_passes());
    return made;
  }();
  return *one;
}

}  // namespace

void register_device_passes(c10::DeviceType type, const DevicePasses& passes) {
  table().set(type, passes);
}

const DevicePasses* find_device_passes(c10::DeviceType type) { return table().find(type); }

}  // namespace pd2
