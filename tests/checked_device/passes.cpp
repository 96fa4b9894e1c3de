#include "checked_device/passes.h"

#include "checked_device/host_grid.h"
#include "checked_device/kernel.h"
#include "engine/weights/grid_passes.h"
#include "engine/weights/tensor_norms.h"

#include <ATen/ops/stack.h>

#include <algorithm>
#include <cstddef>
#include <vector>

namespace pd2 {
namespace {

constexpr std::int64_t kNumBlocks = 3;  // each comes to several chunks

void step_in_threads(const kernels::StepLaunch& launch, void*) {
  kernels::step_on_host(launch, kNumBlocks);
}

const kernels::GridKernels kKernels{&step_in_threads, nullptr};
const GridDevice kDevice{kKernels, nullptr, /*pins_memory=*/true};

// What the kernel reads and writes, from the first run's begin to the last one's end.
std::vector<KernelUse> uses_of(const FlatStep& step, const at::Tensor& table) {
  const auto& [rule, kind, w, w_out, master, g, has_bfloat16_gradients, state, is_fed, kept, unused,
               chunks] = step.arrays;
  std::size_t end = 0, end_of_state = 0;
  for (const kernels::StepOfRun& run : step.runs) {
    end = std::max(end, static_cast<std::size_t>(run.end));
    end_of_state =
        std::max(end_of_state, static_cast<std::size_t>(run.state + run.end - run.begin));
  }
  const bool is_double = kind == kernels::WeightsKind::kDouble;
  const bool has_master = master != nullptr;
  const std::size_t number = is_double ? 8 : 4, weight = has_master ? 2 : number;
  std::vector<KernelUse> uses{{table.const_data_ptr(), table.nbytes(), false},
                              {w, end * weight, false},
                              {g, end * (has_bfloat16_gradients ? 2 : number), false},
                              {w_out, end * weight, true}};
  if (has_master) {
    uses.push_back({master, end * (kind == kernels::WeightsKind::kSplit ? 2 : 4), true});
  }
  for (const void* each : state) {
    if (each != nullptr) uses.push_back({each, end_of_state * number, true});
  }
  if (kept != nullptr) {
    uses.push_back({kept, end_of_state * number, true});
  }
  return uses;
}

DevicePasses passes() {
  return {[](const FlatStep& step, at::Tensor& table) { upload_on_grid(step, table, kDevice); },
          [](const FlatStep& step, const at::Tensor& table) {
            if (step.runs.empty()) return;
            access(uses_of(step, table), "optimizer step");
            step_on_grid(step, table, kDevice);
          },
          // The CPU's numbers, which tests compare with.
          [](const std::vector<at::Tensor>& tensors, double norm_type) {
            std::vector<at::Tensor> norms;
            for (const at::Tensor& tensor : tensors) {
              norms.push_back(norm_by_torch(tensor, norm_type));
            }
            return at::stack(norms).to(at::kDouble);
          }};
}

}  // namespace

const DevicePasses& checked_passes() {
  static const DevicePasses made = passes();
  return made;
}

}  // namespace pd2
