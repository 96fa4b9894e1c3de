// Neighbouring numbers that a thread reads or writes at once, 16 or 8 bytes by an instruction.
//
// What a step reads is not read again before the caches have forgotten it, so it is marked as
// streamed: it leaves their room to others.
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

#ifdef __CUDA_ARCH__
template <bool kIsKept, typename Word>
__device__ void write_word(Word* to, Word word) {
  if constexpr (kIsKept) {
    __stwb(to, word);
  } else {
    __stcs(to, word);
  }
}
#endif

// `kIsKept`: read soon by others, of the caches' room worth.
template <bool kIsKept, int kWidth, typename T>
PD2_HOST_DEVICE void write(T* p, const Pack<T, kWidth>& pack) {
#ifdef __CUDA_ARCH__
  constexpr int kAccesses = sizeof(pack) / kAccessBytes;
  if constexpr (kAccesses > 0) {
    uint4 words[kAccesses];
    memcpy(words, &pack, sizeof(pack));
    for (int i = 0; i < kAccesses; ++i)
      write_word<kIsKept>(reinterpret_cast<uint4*>(p) + i, words[i]);
  } else if constexpr (sizeof(pack) == sizeof(uint2)) {
    uint2 word;
    memcpy(&word, &pack, sizeof(pack));
    write_word<kIsKept>(reinterpret_cast<uint2*>(p), word);
  } else {
    static_assert(kWidth == 1);
    *p = pack.lane[0];
  }
#else
  for (int lane = 0; lane < kWidth; ++lane) p[lane] = pack.lane[lane];
#endif
}

}  // namespace pd2::kernels
