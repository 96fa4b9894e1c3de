// What a device whose kernels are grids of threads does for an optimizer: CUDA, and devices of
// tests, which run the same bodies on the host (tests/checked_device/host_grid.h).
#pragma once

#include "kernels/optimizer.h"

#include <cstdint>

namespace pd2::kernels {

enum class StepRule { kSgd, kAdam };
// See PlainWeights, MasterWeights and SplitWeights.
enum class WeightsKind { kFloat, kDouble, kBfloat16Master, kFloat16Master, kSplit };

// One step over flat arrays in the device's memory. `w_out` may be `w` or, where both are of one
// type, `g`.
struct StepLaunch {
  StepRule rule;
  WeightsKind kind;
  const void* w;
  void* w_out;
  void* master;  // float32, or of kSplit the remainders
  const void* g;
  bool has_bfloat16_gradients = false;  // of kBfloat16Master and kSplit alone
  void* state[3];                       // null where the optimizer keeps none
  bool is_fed = false;                  // runs may have feedback
  void* kept = nullptr;                 // of these; null where there is a float32 master
  const void* table;                    // see step_table.h
  std::int64_t num_chunks;              // blocks to start; the table's own number rules
};

// Calls visit(weights) with the launch's weights, of the type of its kind.
template <typename Visit>
void visit_weights(const StepLaunch& launch, const Visit& visit) {
  const auto* halves = static_cast<const std::uint16_t*>(launch.w);
  auto* halves_out = static_cast<std::uint16_t*>(launch.w_out);
  auto* master = static_cast<float*>(launch.master);
  const auto visit_bfloat16 = [&]<typename Weights>(const Weights& weights) {
    return launch.has_bfloat16_gradients ? visit(Bfloat16Gradients<Weights>{weights})
                                         : visit(weights);
  };
  switch (launch.kind) {
    case WeightsKind::kFloat:
      return visit(PlainWeights<float>{static_cast<const float*>(launch.w),
                                       static_cast<float*>(launch.w_out)});
    case WeightsKind::kDouble:
      return visit(PlainWeights<double>{static_cast<const double*>(launch.w),
                                        static_cast<double*>(launch.w_out)});
    case WeightsKind::kBfloat16Master:
      return visit_bfloat16(MasterWeights<HalfFormat::kBfloat16>{master, halves_out});
    case WeightsKind::kFloat16Master:
      return visit(MasterWeights<HalfFormat::kFloat16>{master, halves_out});
    case WeightsKind::kSplit:
      return visit_bfloat16(
          SplitWeights{halves, static_cast<std::int16_t*>(launch.master), halves_out});
  }
}

enum class NormKind { kOne, kTwo, kMax };  // sum of magnitudes, Euclidean, largest magnitude
enum class Numbers { kFloat, kDouble, kBfloat16 };

// Norms of several arrays. `partials` is room for num_chunks numbers; `norms` gets one for each
// array, rounded to the type of the arrays, of bfloat16 to float32.
struct NormLaunch {
  NormKind kind;
  Numbers numbers;
  const void* table;  // of NormArray, see norm.h
  std::int64_t num_arrays;
  std::int64_t num_chunks;
  double* partials;
  double* norms;
};

// Both enqueue on a stream of the current device (a cudaStream_t) and throw std::runtime_error if
// that fails. The results are bitwise those of the CPU's passes, apart from the bits of NaN, and of
// norms always the same.
struct GridKernels {
  void (*step)(const StepLaunch& launch, void* stream);   // one launch
  void (*norms)(const NormLaunch& launch, void* stream);  // two launches
};

// Where there is CUDA.
const GridKernels& cuda_kernels();

}  // namespace pd2::kernels
