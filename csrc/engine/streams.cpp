#include "engine/streams.h"

#include "engine/by_device_type.h"

namespace pd2 {
namespace {

ByDeviceType<MakeStream>& makers() {
  static ByDeviceType<MakeStream> one;
  return one;
}

}  // namespace

void register_streams(c10::DeviceType type, const MakeStream& make) { makers().set(type, make); }

MaybeStream own_stream(c10::Device device, Urgency urgency) {
  if (!has_streams(device)) {
    return std::nullopt;
  }
  if (const MakeStream* const make = makers().find(device.type())) {
    return (*make)(device, urgency);
  }
  return c10::impl::VirtualGuardImpl(device.type())
      .getStreamFromGlobalPool(device, urgency == Urgency::kMessage);
}

}  // namespace pd2
