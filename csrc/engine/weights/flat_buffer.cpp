#include "engine/weights/flat_buffer.h"

#include "core/check.h"
#include "engine/weights/huge_pages.h"

#include <c10/util/strides.h>

namespace pd2 {
namespace {

constexpr std::int64_t kAlignmentBytes = 64;

}  // namespace

FlatPacking::FlatPacking(const std::vector<at::Tensor>& parameters) {
  PD2_ASSERT(!parameters.empty(), "a flat buffer needs a parameter");
  options_ = parameters.front().options().requires_grad(false);
  const std::int64_t alignment = kAlignmentBytes / parameters.front().element_size();
  for (const at::Tensor& parameter : parameters) {
    PD2_CHECK(parameter.scalar_type() == dtype() && parameter.device() == options_.device(),
              "one flat buffer holds one dtype on one device: ", parameter.scalar_type(), " on ",
              parameter.device(), ", expected ", dtype(), " on ", options_.device());
    ParameterView view;
    view.offset = numel_;
    view.numel = parameter.numel();
    view.sizes = parameter.sizes().vec();
    if (parameter.is_non_overlapping_and_dense()) {
      view.strides = parameter.strides().vec();
    } else {
      const c10::DimVector strides = c10::contiguous_strides(parameter.sizes());
      view.strides.assign(strides.begin(), strides.end());
    }
    parameter_numel_ += view.numel;
    numel_ += (view.numel + alignment - 1) / alignment * alignment;
    views_.push_back(std::move(view));
  }
}

at::Tensor FlatPacking::allocate(at::ScalarType dtype, std::int64_t extra) const {
  return zeros_on_huge_pages(numel_ + extra, options_.dtype(dtype));
}

at::Tensor FlatPacking::view(const at::Tensor& flat, std::size_t parameter) const {
  const ParameterView& view = views_.at(parameter);
  return flat.as_strided(view.sizes, view.strides, flat.storage_offset() + view.offset);
}

}  // namespace pd2
