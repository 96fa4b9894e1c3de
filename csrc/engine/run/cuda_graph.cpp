// CUDA's graphs.
//
// Not those of at::cuda::CUDAGraph. Until torch 2.12 a capture that fails stays under way for it:
// its allocator defers the reuse of memory for ever, and nobody can draw on the device any more
// (pytorch#180395). Nor can other threads draw there during a capture, and graphs that end at the
// same time race. Without that class the device's generators know of no capture, and raise in one:
// what may draw gets a generator of ours.
#ifdef PD2_WITH_CUDA

#include "core/check.h"
#include "engine/by_device_type.h"
#include "engine/run/device_graph.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <optional>
#include <type_traits>
#include <utility>

namespace pd2 {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

using PoolId = decltype(at::cuda::graph_pool_handle());
using IsForCapture = std::function<bool(cudaStream_t)>;

// From the constructor until end() what is allocated for a capture, on the device or pinned on the
// host, comes from the pool. That keeps its memory until the last share of it is gone. Before torch
// 2.11 the host's allocator has no pools.
template <typename HostAllocator>
class PoolShare {
 public:
  PoolShare(PoolId pool, HostAllocator& host, const IsForCapture& is_for_capture)
      : pool_(pool), host_(host) {
    if constexpr (kHostHasPools) {
      host_.begin_allocate_to_pool(pool_, [is_for_capture](c10::Stream stream) {
        return is_for_capture(c10::cuda::CUDAStream(stream));
      });
    }
    allocator::beginAllocateToPool(device_, pool_, is_for_capture);
  }
  ~PoolShare() {
    end();
    allocator::releasePool(device_, pool_);
    if constexpr (kHostHasPools) {
      host_.release_pool(pool_);
    }
  }
  PoolShare(const PoolShare&) = delete;
  PoolShare& operator=(const PoolShare&) = delete;

  void end() {
    if (std::exchange(has_ended_, true)) {
      return;
    }
    allocator::endAllocateToPool(device_, pool_);
    if constexpr (kHostHasPools) {
      host_.end_allocate_to_pool(pool_);
    }
  }

 private:
  static constexpr bool kHostHasPools = requires(HostAllocator & host, PoolId id) {
    host.release_pool(id);
  };

  const PoolId pool_;
  HostAllocator& host_;
  const c10::DeviceIndex device_ = c10::cuda::current_device();
  bool has_ended_ = false;
};

// A generator's state for which the stream's work is captured: kernels read seed and offset where
// they are, to which the host adds what the draw's kernels before have taken.
template <typename State>
c10::intrusive_ptr<State> capturing_state(const at::Tensor& seed, unsigned long long capture) {
  auto state = c10::make_intrusive<State>();
  if constexpr (requires {  // from torch 2.12 on
                  state->capture_states_[capture]->rng_state_seed_extragraph_.defined();
                  state->capture_states_[capture]->rng_state_offset_extragraph_.defined();
                }) {
    using OfCapture = std::remove_reference_t<decltype(*state->capture_states_[capture])>;
    auto of_capture = c10::make_intrusive<OfCapture>();
    of_capture->rng_state_seed_extragraph_ = seed.select(0, 0);
    of_capture->rng_state_offset_extragraph_ = seed.select(0, 1);
    state->capture_states_[capture] = std::move(of_capture);
  } else if constexpr (requires { state->capturing_ = state->seed_extragraph_.defined(); }) {
    state->capturing_ = true;
    state->seed_extragraph_ = seed.select(0, 0);
    state->offset_extragraph_ = seed.select(0, 1);
  } else {
    PD2_CHECK(false, "it draws random numbers, which this torch's generators cannot record");
  }
  return state;
}

std::int64_t reserved_bytes() {
  const auto stats = allocator::getDeviceStats(c10::cuda::current_device());
  return stats.reserved_bytes[0].current;  // the aggregate
}

std::int64_t free_bytes() {
  std::size_t free = 0, total = 0;
  C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  return static_cast<std::int64_t>(free);
}

class CudaGraph final : public DeviceGraph {
 public:
  explicit CudaGraph(const CudaGraph* beside)
      : pool_(beside ? beside->pool_ : at::cuda::graph_pool_handle()) {}
  ~CudaGraph() override {
    if (executable_ != nullptr) {
      (void)cudaGraphExecDestroy(executable_);  // after what has been launched of it
    }
  }

  // Other threads may allocate, and launch on other streams, meanwhile.
  void begin(std::int64_t bytes) override {
    // It frees memory of a forward's graph that a backward's goes on to use.
    PD2_CHECK(allocator::name() != "cudaMallocAsync",
              "torch's allocator is cudaMallocAsync: graphs need its own (backend:native)");
    if (free_bytes() < bytes) {
      allocator::emptyCache();
    }
    stream_ = c10::cuda::getCurrentCUDAStream();
    reserved_ = reserved_bytes();
    // Before the capture, during which the allocator may record no event on the stream.
    const IsForCapture is_for_capture = [this](cudaStream_t stream) { return is_mine(stream); };
    share_.emplace(pool_, *at::getHostAllocator(at::kCUDA), is_for_capture);
    try {
      C10_CUDA_CHECK(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
      cudaStreamCaptureStatus status{};
      unsigned long long id = 0;
      C10_CUDA_CHECK(cudaStreamGetCaptureInfo(stream_, &status, &id));
      id_ = id;
    } catch (...) {
      abandon();
      throw;
    }
  }

  void end() override {
    Recorded recorded;
    C10_CUDA_CHECK(stop(recorded));
    C10_CUDA_CHECK(cudaGraphInstantiateWithFlags(&executable_, recorded.graph, /*flags=*/0));
    // What other threads have reserved meanwhile counts here, too.
    bytes_ = std::max<std::int64_t>(reserved_bytes() - reserved_, 0);
  }

  void abandon() noexcept override {
    Recorded recorded;
    (void)stop(recorded);
    (void)cudaGetLastError();  // that something could not be recorded has been said
  }

  at::Generator generator(const at::Tensor& seed) override {
    return at::make_generator<at::CUDAGeneratorImpl>(
        seed.device().index(), capturing_state<at::CUDAGeneratorState>(seed, id_));
  }

  void replay() override {
    C10_CUDA_CHECK(cudaGraphLaunch(executable_, c10::cuda::getCurrentCUDAStream()));
  }
  std::int64_t bytes() const override { return bytes_; }

 private:
  using Share = PoolShare<std::remove_pointer_t<decltype(at::getHostAllocator(at::kCUDA))>>;
  struct Recorded {
    cudaGraph_t graph = nullptr;

    Recorded() = default;
    ~Recorded() {
      if (graph != nullptr) {
        (void)cudaGraphDestroy(graph);
      }
    }
    Recorded(const Recorded&) = delete;
    Recorded& operator=(const Recorded&) = delete;
  };

  // Whatever the capture has come to, the allocators are as without it.
  cudaError_t stop(Recorded& recorded) noexcept {
    const cudaError_t error = cudaStreamEndCapture(stream_, &recorded.graph);
    id_ = 0;
    share_->end();
    return error;
  }

  // Whether the stream takes part in the capture, which other streams can join. From any thread
  // that allocates.
  bool is_mine(cudaStream_t stream) const {
    const unsigned long long mine = id_;
    cudaStreamCaptureStatus status{};
    unsigned long long id = 0;
    return mine != 0 && cudaStreamGetCaptureInfo(stream, &status, &id) == cudaSuccess &&
           status == cudaStreamCaptureStatusActive && id == mine;
  }

  const PoolId pool_;
  cudaStream_t stream_ = nullptr;
  std::atomic<unsigned long long> id_ = 0;  // of the capture under way; 0: none
  std::optional<Share> share_;
  cudaGraphExec_t executable_ = nullptr;
  std::int64_t reserved_ = 0;
  std::int64_t bytes_ = 0;
};

[[maybe_unused]] const bool is_set = [] {
  by_device_type<MakeDeviceGraph>().set(
      c10::DeviceType::CUDA, [](const DeviceGraph* beside) -> std::unique_ptr<DeviceGraph> {
        return std::make_unique<CudaGraph>(static_cast<const CudaGraph*>(beside));
      });
  return true;
}();

}  // namespace
}  // namespace pd2

#endif
