#include "engine/weights/grid_passes.h"

#include "core/check.h"
#include "kernels/grid/norm.h"

#include <ATen/ops/empty.h>

#include <cmath>
#include <cstddef>
#include <cstring>

namespace pd2 {
namespace {

// Into memory that stays where it is while it is long enough. torch keeps the host's memory until
// it has been read.
void upload_bytes(std::span<const std::byte> bytes, c10::Device to, bool pins_memory,
                  at::Tensor& table) {
  const auto size = static_cast<std::int64_t>(bytes.size());
  const at::TensorOptions options(at::kByte);
  const at::Tensor staged = at::empty({size}, options.pinned_memory(pins_memory));
  std::memcpy(staged.mutable_data_ptr(), bytes.data(), bytes.size());
  if (!table.defined() || table.numel() < size) {
    table = at::empty({size}, options.device(to));
  }
  table.narrow(0, 0, size).copy_(staged, /*non_blocking=*/true);
}

kernels::Numbers numbers_of(at::ScalarType dtype) {
  if (dtype == at::kBFloat16) return kernels::Numbers::kBfloat16;
  return dtype == at::kDouble ? kernels::Numbers::kDouble : kernels::Numbers::kFloat;
}

kernels::NormKind norm_kind(double norm_type) {
  if (norm_type == 1) return kernels::NormKind::kOne;
  if (norm_type == 2) return kernels::NormKind::kTwo;
  PD2_ASSERT(norm_type == INFINITY, "no pass for norm type ", norm_type);
  return kernels::NormKind::kMax;
}

}  // namespace

void upload_on_grid(const FlatStep& step, at::Tensor& table, const GridDevice& device) {
  upload_bytes(
      kernels::step_table(step.arrays.rule, step.arrays.kind, step.runs, step.gradient_scale),
      step.device, device.pins_memory, table);
  if (step.factor.defined()) {  // which the host does not know
    constexpr std::int64_t kPlace = offsetof(kernels::StepControl, gradient_scale);
    table.narrow(0, kPlace, sizeof(double)).view(at::kDouble).copy_(step.factor);
  }
}

void step_on_grid(const FlatStep& step, const at::Tensor& table, const GridDevice& device) {
  kernels::StepLaunch launch = step.arrays;
  launch.table = table.const_data_ptr();
  for (const kernels::StepOfRun& run : step.runs) {
    launch.num_chunks += kernels::num_chunks(run.end - run.begin, kernels::kStepChunk);
  }
  device.kernels.step(launch, device.stream);
}

at::Tensor norms_on_grid(const std::vector<at::Tensor>& tensors, double norm_type,
                         const GridDevice& device) {
  std::vector<kernels::NormArray> arrays;
  std::int64_t num_chunks = 0;
  for (const at::Tensor& tensor : tensors) {
    PD2_ASSERT(tensor.is_non_overlapping_and_dense(), "a norm over what is not dense");
    arrays.push_back({tensor.const_data_ptr(), tensor.numel(), num_chunks});
    num_chunks += kernels::num_chunks(tensor.numel(), kernels::kNormChunk);
  }
  const c10::Device on = tensors.front().device();
  const auto count = static_cast<std::int64_t>(arrays.size());
  at::Tensor table;
  upload_bytes(std::as_bytes(std::span(arrays)), on, device.pins_memory, table);
  const at::Tensor results =
      at::empty({count + num_chunks}, at::TensorOptions(at::kDouble).device(on));
  auto* norms = results.mutable_data_ptr<double>();
  device.kernels.norms({.kind = norm_kind(norm_type),
                        .numbers = numbers_of(tensors.front().scalar_type()),
                        .table = table.const_data_ptr(),
                        .num_arrays = count,
                        .num_chunks = num_chunks,
                        .partials = norms + count,
                        .norms = norms},
                       device.stream);
  return results.narrow(0, 0, count);
}

}  // namespace pd2
