#include "checked_device/streams.h"

#include "checked_device/runtime.h"

#include <c10/util/Exception.h>

#include <array>
#include <cstddef>
#include <mutex>
#include <vector>

namespace pd2 {
namespace {

constexpr std::size_t kPoolSize = 32;

struct OfThread {
  int device = 0;
  std::array<StreamNumber, Runtime::kDevices> streams{};  // 0: the default one

  StreamNumber& stream(int index) {
    if (streams[index] == 0) streams[index] = index;
    return streams[index];
  }
};

thread_local OfThread of_thread;

struct Pool {
  std::vector<StreamNumber> streams;
  std::size_t next = 0;
};

}  // namespace

c10::Device checked_device(int index) {
  return {c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(index)};
}

int index_of(c10::Device device) {
  TORCH_CHECK(device.is_privateuseone(), "device: ", device, ", must be a checked one");
  const int index = device.has_index() ? device.index() : current_device();
  TORCH_CHECK(index < Runtime::kDevices, "device: ", device, ", there are ", Runtime::kDevices);
  return index;
}

int current_device() { return of_thread.device; }

int exchange_device(int index) {
  const int before = of_thread.device;
  if (index < 0) return before;
  TORCH_CHECK(index < Runtime::kDevices, "device: ", index, ", there are ", Runtime::kDevices);
  of_thread.device = index;
  return before;
}

StreamNumber number_of(const c10::Stream& stream) {
  return stream.id() == 0 ? index_of(stream.device()) : static_cast<StreamNumber>(stream.id());
}

c10::Stream stream_of(StreamNumber number) {
  const auto device = checked_device(Runtime::instance().device_of(number));
  const bool is_default = number < Runtime::kDevices;
  return c10::Stream(c10::Stream::UNSAFE, device,
                     is_default ? 0 : static_cast<c10::StreamId>(number));
}

StreamNumber current_stream_number(int device) { return of_thread.stream(device); }

c10::Stream current_stream(int device) { return stream_of(current_stream_number(device)); }

c10::Stream exchange_stream(const c10::Stream& stream) {
  const int device = index_of(stream.device());
  const auto before = current_stream(device);
  of_thread.stream(device) = number_of(stream);
  return before;
}

c10::Stream stream_from_pool(int device, bool high_priority) {
  static std::mutex mutex;
  static std::array<std::array<Pool, 2>, Runtime::kDevices> pools;
  const std::lock_guard lock(mutex);
  auto& pool = pools.at(device)[high_priority ? 1 : 0];
  const std::size_t place = pool.next++ % kPoolSize;
  if (place == pool.streams.size()) {
    pool.streams.push_back(Runtime::instance().add_stream(device, high_priority ? -1 : 0));
  }
  return stream_of(pool.streams[place]);
}

}  // namespace pd2
