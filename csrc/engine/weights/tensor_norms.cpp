#include "engine/weights/tensor_norms.h"

#include "engine/weights/device_passes.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <c10/core/DeviceGuard.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>

namespace pd2 {
namespace {

at::Tensor norms_by_torch(const std::vector<at::Tensor>& tensors, double norm_type) {
  std::vector<at::Tensor> norms;
  for (const at::Tensor& tensor : tensors) {
    norms.push_back(norm_by_torch(tensor, norm_type).to(at::kDouble));
  }
  return at::stack(norms);
}

}  // namespace

at::Tensor norms_of(const std::vector<at::Tensor>& tensors, double norm_type) {
  if (tensors.empty()) return at::empty({0}, at::kDouble);
  std::map<at::ScalarType, std::vector<std::size_t>> by_dtype;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    by_dtype[tensors[i].scalar_type()].push_back(i);
  }
  std::vector<at::Tensor> norms(tensors.size());
  for (const auto& [dtype, members] : by_dtype) {
    std::vector<at::Tensor> alike;
    for (const std::size_t member : members) alike.push_back(tensors[member]);
    const c10::DeviceGuard guard(alike.front().device());
    const DevicePasses* passes = by_device_type<DevicePasses>().find(alike.front().device().type());
    const bool is_known = dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16;
    const bool has_pass = passes != nullptr && passes->norms != nullptr && is_known &&
                          (norm_type == 1 || norm_type == 2 || norm_type == INFINITY);
    const at::Tensor values =
        has_pass ? passes->norms(alike, norm_type) : norms_by_torch(alike, norm_type);
    if (by_dtype.size() == 1) return values;
    for (std::size_t i = 0; i < members.size(); ++i) {
      norms[members[i]] = values[static_cast<std::int64_t>(i)];
    }
  }
  return at::stack(norms);
}

}  // namespace pd2
