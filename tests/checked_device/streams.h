// The current device and streams of each host thread, as c10 names them.

#pragma once

#include "checked_device/clock.h"

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

namespace pd2 {

c10::Device checked_device(int index);
// Of the current one where the device has no index; throws if there is no such device.
int index_of(c10::Device device);

int current_device();
int exchange_device(int index);

StreamNumber number_of(const c10::Stream& stream);
c10::Stream stream_of(StreamNumber number);

c10::Stream current_stream(int device);
StreamNumber current_stream_number(int device);
c10::Stream exchange_stream(const c10::Stream& stream);
// One of 32 for each device and priority, in turn, as CUDA's.
c10::Stream stream_from_pool(int device, bool high_priority);

}  // namespace pd2
