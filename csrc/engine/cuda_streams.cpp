// CUDA's streams, of torch's pools: these have three priorities more than the lowest.
#ifdef PD2_WITH_CUDA

#include "engine/streams.h"

#include <c10/cuda/CUDAStream.h>

namespace pd2 {
namespace {

c10::Stream make_stream(c10::Device device, Urgency urgency) {
  switch (urgency) {
    case Urgency::kBackground:
      break;
    case Urgency::kStage:
      return c10::cuda::getStreamFromPool(-1, device.index()).unwrap();
    case Urgency::kMessage:
      return c10::cuda::getStreamFromPool(/*isHighPriority=*/true, device.index()).unwrap();
  }
  return c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index()).unwrap();
}

[[maybe_unused]] const bool kMakesStreams = [] {
  by_device_type<MakeStream>().set(c10::DeviceType::CUDA, make_stream);
  return true;
}();

}  // namespace
}  // namespace pd2

#endif
