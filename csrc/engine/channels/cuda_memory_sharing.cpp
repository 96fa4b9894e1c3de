// CUDA's memory between processes: IPC handles, copies, and words that streams write and wait for
// (stream memory operations), which keep no SM busy.
#ifdef PD2_WITH_CUDA

#include "engine/by_device_type.h"
#include "engine/channels/device_memory_sharing.h"

#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <mutex>
#include <vector>

namespace pd2 {
namespace {

// Found in the driver's library: it is there where there is a GPU, not where this is built.
struct Driver {
  CUresult (*write)(CUstream, CUdeviceptr, cuuint32_t, unsigned int) = nullptr;
  CUresult (*wait)(CUstream, CUdeviceptr, cuuint32_t, unsigned int) = nullptr;

  bool is_there() const { return write != nullptr && wait != nullptr; }

  static const Driver& instance() {
    static const Driver driver = [] {
      Driver found;
      if (void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL)) {
        const auto find = [library](auto& function, const char* name) {
          void* const symbol = dlsym(library, name);
          std::memcpy(&function, &symbol, sizeof symbol);
        };
        find(found.write, "cuStreamWriteValue32_v2");
        find(found.wait, "cuStreamWaitValue32_v2");
      }
      return found;
    }();
    return driver;
  }
};

// What was asked for cannot be had: no error for whoever calls CUDA next.
bool succeeds(cudaError_t result) {
  if (result != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
  }
  return result == cudaSuccess;
}

// None is ever destroyed: torch's allocator may record events on any that has used its memory.
std::mutex idle_streams_mutex;
std::vector<c10::Stream> idle_streams;

MaybeStream take_stream(c10::Device device) {
  const c10::DeviceGuard guard(device);
  const c10::DeviceIndex here = c10::cuda::current_device();
  const std::lock_guard lock(idle_streams_mutex);
  const auto idle = std::find_if(idle_streams.begin(), idle_streams.end(),
                                 [&](const auto& each) { return each.device_index() == here; });
  if (idle != idle_streams.end()) {
    const c10::Stream found = *idle;
    idle_streams.erase(idle);
    return found;
  }
  // Of the highest priority: the other process waits for what this one copies.
  int lowest = 0, highest = 0;
  C10_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
  cudaStream_t made = nullptr;
  C10_CUDA_CHECK(cudaStreamCreateWithPriority(&made, cudaStreamNonBlocking, highest));
  return c10::cuda::getStreamFromExternal(made, here).unwrap();
}

void give_back(const MaybeStream& stream) {
  const std::lock_guard lock(idle_streams_mutex);
  idle_streams.push_back(*stream);
}

// CUDA puts allocations of less into one block, and an IPC handle opens all of its block: another
// ring's memory, too, or one that is open already.
constexpr std::size_t kBlock = std::size_t{2} << 20;

std::shared_ptr<std::byte> allocate(c10::Device device, std::size_t bytes, std::string& address) {
  const c10::DeviceGuard guard(device);
  void* data = nullptr;
  cudaIpcMemHandle_t handle;
  if (!Driver::instance().is_there()) {
    return nullptr;
  }
  bytes = (bytes + kBlock - 1) / kBlock * kBlock;
  if (!succeeds(cudaMalloc(&data, bytes))) {
    {
      const std::lock_guard lock(recording_mutex());
      c10::cuda::CUDACachingAllocator::emptyCache();  // torch may hold memory that nothing uses
    }
    if (!succeeds(cudaMalloc(&data, bytes))) {
      return nullptr;
    }
  }
  const std::shared_ptr<std::byte> memory(static_cast<std::byte*>(data), [device](void* freed) {
    const c10::DeviceGuard here(device);
    succeeds(cudaFree(freed));
  });
  if (!succeeds(cudaIpcGetMemHandle(&handle, data))) {
    return nullptr;
  }
  address.clear();
  for (const char byte : handle.reserved) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", static_cast<unsigned char>(byte));
    address += digits;
  }
  return memory;
}

std::shared_ptr<std::byte> open(c10::Device device, const std::string& address) {
  const c10::DeviceGuard guard(device);
  cudaIpcMemHandle_t handle;
  if (!Driver::instance().is_there() || address.size() != 2 * sizeof handle.reserved) {
    return nullptr;
  }
  for (std::size_t i = 0; i < sizeof handle.reserved; ++i) {
    handle.reserved[i] = static_cast<char>(std::stoi(address.substr(2 * i, 2), nullptr, 16));
  }
  void* data = nullptr;
  if (!succeeds(cudaIpcOpenMemHandle(&data, handle, cudaIpcMemLazyEnablePeerAccess))) {
    return nullptr;
  }
  return {static_cast<std::byte*>(data), [device](void* closed) {
            const c10::DeviceGuard here(device);
            succeeds(cudaIpcCloseMemHandle(closed));
          }};
}

std::shared_ptr<void> pin(c10::Device device, std::byte* pages, std::size_t bytes) {
  const c10::DeviceGuard guard(device);
  if (!succeeds(
          cudaHostRegister(pages, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped))) {
    return nullptr;
  }
  return {pages, [device](void* unpinned) {
            const c10::DeviceGuard here(device);
            succeeds(cudaHostUnregister(unpinned));
          }};
}

void copy(std::byte* to, const std::byte* from, std::size_t bytes, const MaybeStream& stream) {
  const c10::DeviceGuard guard(stream->device());
  C10_CUDA_CHECK(
      cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, c10::cuda::CUDAStream(*stream).stream()));
}

CUdeviceptr address_of(SharedWord& word) {
  void* address = nullptr;
  C10_CUDA_CHECK(cudaHostGetDevicePointer(&address, &word, 0));
  return reinterpret_cast<CUdeviceptr>(address);
}

void set(SharedWord& word, std::uint32_t value, const MaybeStream& stream) {
  const c10::DeviceGuard guard(stream->device());
  const CUresult result =
      Driver::instance().write(c10::cuda::CUDAStream(*stream).stream(), address_of(word), value,
                               CU_STREAM_WRITE_VALUE_DEFAULT);
  TORCH_CHECK(result == CUDA_SUCCESS, "cuStreamWriteValue32: error ", static_cast<int>(result));
}

void await(SharedWord& word, std::uint32_t value, const MaybeStream& stream) {
  const c10::DeviceGuard guard(stream->device());
  const CUresult result = Driver::instance().wait(
      c10::cuda::CUDAStream(*stream).stream(), address_of(word), value, CU_STREAM_WAIT_VALUE_GEQ);
  TORCH_CHECK(result == CUDA_SUCCESS, "cuStreamWaitValue32: error ", static_cast<int>(result));
}

[[maybe_unused]] const bool kSharesMemory = [] {
  by_device_type<DeviceMemorySharing>().set(
      c10::DeviceType::CUDA, {take_stream, give_back, allocate, open, pin, copy, set, await});
  return true;
}();

}  // namespace
}  // namespace pd2

#endif
