// The bodies of the two kernels that compute the norms of several arrays: sums over chunks of them,
// then over each array's chunks. Every sum has an order of its own, which neither the device nor
// the number of blocks nor alignment changes.
#pragma once

#include "kernels/grid/grid.h"
#include "kernels/grid/launch.h"
#include "kernels/grid/number.h"
#include "kernels/grid/pack.h"
#include "kernels/half.h"

#include <cstdint>
#include <type_traits>

namespace pd2::kernels {

constexpr std::int64_t kNormChunk = 16384;  // elements

// The table holds these, in the order of their first chunks.
struct NormArray {
  const void* begin;
  std::int64_t n;
  std::int64_t first_chunk;
};

namespace {

struct Bfloat16 {
  std::uint16_t bits;
  PD2_HOST_DEVICE operator double() const { return float_of_bfloat16(bits); }
};

// Narrower numbers are squared and added up in double: no square overflows.
template <NormKind kKind>
PD2_HOST_DEVICE Double with_number(Double sum, double number) {
  const Double magnitude{number < 0 ? -number : number};
  if constexpr (kKind == NormKind::kTwo) return fma(Double{number}, Double{number}, sum);
  if constexpr (kKind == NormKind::kOne) return add(sum, magnitude);
  return max(magnitude, sum);
}
template <NormKind kKind>
PD2_HOST_DEVICE Double joined(Double a, Double b) {
  return kKind == NormKind::kMax ? max(a, b) : add(a, b);
}

// A thread's part of n <= kNormChunk numbers.
template <NormKind kKind, typename T>
PD2_HOST_DEVICE double sum_of_thread(const T* numbers, int n, int thread) {
  constexpr int kWidth = kAccessBytes / static_cast<int>(sizeof(T));
  const bool aligned = is_aligned(numbers);
  Double sums[kWidth] = {};
  for (int i = thread * kWidth; i < n; i += kThreads * kWidth) {
    if (aligned && i + kWidth <= n) {
      const Pack<T, kWidth> pack = read<kWidth>(numbers + i);
      for (int lane = 0; lane < kWidth; ++lane) {
        sums[lane] = with_number<kKind>(sums[lane], pack.lane[lane]);
      }
    } else {
      for (int lane = 0; lane < kWidth; ++lane) {
        if (i + lane < n) sums[lane] = with_number<kKind>(sums[lane], numbers[i + lane]);
      }
    }
  }
  Double sum = sums[0];
  for (int lane = 1; lane < kWidth; ++lane) sum = joined<kKind>(sum, sums[lane]);
  return sum.v;
}

// The first thread's number becomes the sum of all.
template <NormKind kKind>
PD2_HOST_DEVICE void sum_of_block(double* of_threads) {
  constexpr BlockThreads kAll;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    kAll([&](int thread) {
      if (thread < half) {
        of_threads[thread] = joined<kKind>({of_threads[thread]}, {of_threads[thread + half]}).v;
      }
    });
  }
}

// `of_threads`: memory of the block, kThreads numbers.
template <NormKind kKind, typename T>
PD2_HOST_DEVICE void sum_chunks(const NormLaunch& a, std::int64_t block, std::int64_t num_blocks,
                                double* of_threads) {
  constexpr BlockThreads kAll;
  const auto* arrays = static_cast<const NormArray*>(a.table);
  int at = 0;
  for (std::int64_t chunk = block; chunk < a.num_chunks; chunk += num_blocks) {
    at = item_of_chunk(arrays, at, static_cast<int>(a.num_arrays), chunk);
    const NormArray array = arrays[at];
    const std::int64_t skipped = (chunk - array.first_chunk) * kNormChunk;
    const std::int64_t left = array.n - skipped;
    const int n = static_cast<int>(left < kNormChunk ? left : kNormChunk);
    const T* numbers = static_cast<const T*>(array.begin) + skipped;
    kAll([&](int thread) { of_threads[thread] = sum_of_thread<kKind>(numbers, n, thread); });
    sum_of_block<kKind>(of_threads);
    kAll([&](int thread) {
      if (thread == 0) a.partials[chunk] = of_threads[0];
    });
  }
}

template <NormKind kKind, typename T>
PD2_HOST_DEVICE void finish_norms(const NormLaunch& a, std::int64_t block, std::int64_t num_blocks,
                                  double* of_threads) {
  constexpr BlockThreads kAll;
  const auto* arrays = static_cast<const NormArray*>(a.table);
  for (std::int64_t i = block; i < a.num_arrays; i += num_blocks) {
    const std::int64_t begin = arrays[i].first_chunk;
    const std::int64_t end = begin + (arrays[i].n + kNormChunk - 1) / kNormChunk;
    kAll([&](int thread) {
      Double sum{0};
      for (std::int64_t chunk = begin + thread; chunk < end; chunk += kThreads) {
        sum = joined<kKind>({a.partials[chunk]}, sum);
      }
      of_threads[thread] = sum.v;
    });
    sum_of_block<kKind>(of_threads);
    kAll([&](int thread) {
      const Double sum{of_threads[0]};
      const double norm = kKind == NormKind::kTwo ? sqrt(sum).v : sum.v;
      using Norm = std::conditional_t<std::is_same_v<T, double>, double, float>;
      if (thread == 0) a.norms[i] = static_cast<double>(static_cast<Norm>(norm));
    });
  }
}

// Calls visit(std::integral_constant<NormKind>, std::type_identity<T>) with the launch's types.
template <typename Visit>
void visit_norm(const NormLaunch& launch, const Visit& visit) {
  const auto of_type = [&]<typename T>(std::type_identity<T> type) {
    switch (launch.kind) {
      case NormKind::kOne:
        return visit(std::integral_constant<NormKind, NormKind::kOne>(), type);
      case NormKind::kTwo:
        return visit(std::integral_constant<NormKind, NormKind::kTwo>(), type);
      case NormKind::kMax:
        return visit(std::integral_constant<NormKind, NormKind::kMax>(), type);
    }
  };
  switch (launch.numbers) {
    case Numbers::kFloat:
      return of_type(std::type_identity<float>());
    case Numbers::kDouble:
      return of_type(std::type_identity<double>());
    case Numbers::kBfloat16:
      return of_type(std::type_identity<Bfloat16>());
  }
}

}  // namespace
}  // namespace pd2::kernels
