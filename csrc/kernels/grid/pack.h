// Neighbouring numbers that a thread reads or writes at once, 16 or 8 bytes by an instruction.
//
// All of it is marked as streamed (.cs). A step of more than the caches hold was up to a tenth
// slower with any other marks, on an H200: kept in the second level's cache (.cg, .wb), or none.
#pragma once

#include "kernels/host_device.h"

#include <cstdint>
#include <cstring>

namespace pd2::kernels {

constexpr int kAccessBytes = 16;

template <typename T, int kWidth>
struct Pack {
  T lane[kWidth];
};

// Whether neighbours that begin there can be accessed 16 bytes at a time.
PD2_HOST_DEVICE inline bool is_aligned(const void* p) {
  return reinterpret_cast<std::uintptr_t>(p) % kAccessBytes == 0;
}

template <int kWidth, typename T>
PD2_HOST_DEVICE Pack<T, kWidth> read(const T* p) {
  Pack<T, kWidth> pack;
#ifdef __CUDA_ARCH__
  constexpr int kAccesses = sizeof(pack) / kAccessBytes;
  if constexpr (kAccesses > 0) {
    uint4 words[kAccesses];
    for (int i = 0; i < kAccesses; ++i) words[i] = __ldcs(reinterpret_cast<const uint4*>(p) + i);
    memcpy(&pack, words, sizeof(pack));
  } else if constexpr (sizeof(pack) == sizeof(uint2)) {
    const uint2 word = __ldcs(reinterpret_cast<const uint2*>(p));
    memcpy(&pack, &word, sizeof(pack));
  } else {
    static_assert(kWidth == 1);
    pack.lane[0] = __ldcs(p);
  }
#else
  for (int lane = 0; lane < kWidth; ++lane) pack.lane[lane] = p[lane];
#endif
  return pack;
}

template <int kWidth, typename T>
PD2_HOST_DEVICE void write(T* p, const Pack<T, kWidth>& pack) {
#ifdef __CUDA_ARCH__
  constexpr int kAccesses = sizeof(pack) / kAccessBytes;
  if constexpr (kAccesses > 0) {
    uint4 words[kAccesses];
    memcpy(words, &pack, sizeof(pack));
    for (int i = 0; i < kAccesses; ++i) __stcs(reinterpret_cast<uint4*>(p) + i, words[i]);
  } else if constexpr (sizeof(pack) == sizeof(uint2)) {
    uint2 word;
    memcpy(&word, &pack, sizeof(pack));
    __stcs(reinterpret_cast<uint2*>(p), word);
  } else {
    static_assert(kWidth == 1);
    *p = pack.lane[0];
  }
#else
  for (int lane = 0; lane < kWidth; ++lane) p[lane] = pack.lane[lane];
#endif
}

}  // namespace pd2::kernels
