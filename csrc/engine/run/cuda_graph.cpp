// CUDA's graphs.
#ifdef PD2_WITH_CUDA

#include "engine/run/device_graph.h"

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <exception>

namespace pd2 {
namespace {

std::int64_t reserved_bytes() {
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(c10::cuda::current_device());
  return stats.reserved_bytes[0].current;  // the aggregate
}

class CudaGraph : public DeviceGraph {
 public:
  explicit CudaGraph(const CudaGraph* beside)
      : pool_(beside ? beside->pool_ : at::cuda::graph_pool_handle()) {}

  // Other threads may allocate, and launch on other streams, meanwhile.
  void begin() override {
    reserved_ = reserved_bytes();
    graph_.capture_begin(pool_, cudaStreamCaptureModeThreadLocal);
  }
  void end() override {
    graph_.capture_end();
    // What other threads have reserved meanwhile counts here, too.
    bytes_ = std::max<std::int64_t>(reserved_bytes() - reserved_, 0);
  }
  void abandon() noexcept override {
    try {
      graph_.capture_end();
    } catch (const std::exception&) {
      // It says again that something could not be recorded.
    }
    (void)cudaGetLastError();
  }
  void replay() override { graph_.replay(); }
  std::int64_t bytes() const override { return bytes_; }

 private:
  const decltype(at::cuda::graph_pool_handle()) pool_;
  at::cuda::CUDAGraph graph_;
  std::int64_t reserved_ = 0;
  std::int64_t bytes_ = 0;
};

[[maybe_unused]] const bool is_set = [] {
  register_device_graphs(
      c10::DeviceType::CUDA, [](const DeviceGraph* beside) -> std::unique_ptr<DeviceGraph> {
        return std::make_unique<CudaGraph>(static_cast<const CudaGraph*>(beside));
      });
  return true;
}();

}  // namespace
}  // namespace pd2

#endif
