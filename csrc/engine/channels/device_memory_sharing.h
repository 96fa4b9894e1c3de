// What a kind of device does so that two processes of a machine use one memory of it, found by
// device type.
#pragma once

#include "engine/streams.h"

#include <c10/core/Device.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace pd2 {

// In memory of the hosts that processes share: it counts up, modulo 2^32. Streams write to it and
// wait for it; a host that writes ends their waiting, whatever has become of the other process.
using SharedWord = std::atomic<std::uint32_t>;

// See by_device_type(): CUDA's is there where it was built, and where there is none, none of the
// device's memory is shared.
struct DeviceMemorySharing {
  // A stream that waits for another process: behind it is no other work, as there may be behind
  // streams of a pool. It is to be given back idle.
  MaybeStream (*take_stream)(c10::Device device);
  void (*give_back)(const MaybeStream& stream);
  // Memory of the device, and its address for open() in another process, while the memory is there.
  // Null if the device cannot share any.
  std::shared_ptr<std::byte> (*allocate)(c10::Device device, std::size_t bytes,
                                         std::string& address);
  // Another process's, of this device or of one that can reach it. Null if this one cannot. It is
  // to be closed before it is freed.
  std::shared_ptr<std::byte> (*open)(c10::Device device, const std::string& address);
  // Whole pages of the host's: while the result lives streams of the device may use words in them.
  // Null if they cannot.
  std::shared_ptr<void> (*pin)(c10::Device device, std::byte* pages, std::size_t bytes);

  // Work of a stream. `from` or `to` is shared memory; whoever calls keeps both.
  void (*copy)(std::byte* to, const std::byte* from, std::size_t bytes, const MaybeStream& stream);
  // After all that the stream was given before, so that whoever sees the value sees that too.
  void (*set)(SharedWord& word, std::uint32_t value, const MaybeStream& stream);
  // Until the word has reached the value: is at most 2^31 - 1 above it, modulo 2^32.
  void (*await)(SharedWord& word, std::uint32_t value, const MaybeStream& stream);
};

}  // namespace pd2
