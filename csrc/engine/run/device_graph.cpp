#include "engine/run/device_graph.h"

#include "engine/by_device_type.h"

namespace pd2 {
namespace {

ByDeviceType<MakeDeviceGraph>& table() {
  static auto* const one = new ByDeviceType<MakeDeviceGraph>;
  return *one;
}

}  // namespace

void register_device_graphs(c10::DeviceType type, const MakeDeviceGraph& make) {
  table().set(type, make);
}

MakeDeviceGraph find_device_graphs(c10::DeviceType type) {
  const MakeDeviceGraph* const make = table().find(type);
  return make ? *make : nullptr;
}

}  // namespace pd2
