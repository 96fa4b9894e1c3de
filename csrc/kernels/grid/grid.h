// How a kernel's work is shared out: in chunks of elements, to blocks of threads. The bodies of
// kernels are plain functions of a block's and a thread's number, so that the host can run them
// too, one thread after the other.
#pragma once

#include "kernels/host_device.h"

#include <cstdint>

namespace pd2::kernels {

constexpr int kThreads = 256;  // of a block

struct GridThread {
  std::int64_t block = 0;
  std::int64_t num_blocks = 1;
  int thread = 0;
};

// Of items in the order of their first chunks, the one to which `chunk` belongs; `from` is not
// after it.
template <typename Item>
PD2_HOST_DEVICE int item_of_chunk(const Item* items, int from, int num_items, std::int64_t chunk) {
  int end = num_items;
  while (end - from > 1) {
    const int middle = from + (end - from) / 2;
    if (items[middle].first_chunk <= chunk) {
      from = middle;
    } else {
      end = middle;
    }
  }
  return from;
}

constexpr std::int64_t num_chunks(std::int64_t n, std::int64_t chunk) {
  return (n + chunk - 1) / chunk;
}

// Runs a function in all threads of a block and waits until all are through. On the host the
// threads take turns.
struct BlockThreads {
  template <typename Function>
  PD2_HOST_DEVICE void operator()(const Function& function) const {
#ifdef __CUDA_ARCH__
    function(static_cast<int>(threadIdx.x));
    __syncthreads();
#else
    for (int thread = 0; thread < kThreads; ++thread) function(thread);
#endif
  }
};

}  // namespace pd2::kernels
