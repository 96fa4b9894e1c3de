#include "engine/weights/flat_buffer.h"

#include "core/check.h"

#include <ATen/ops/empty.h>
#include <c10/util/strides.h>

#include <atomic>
#include <sys/mman.h>

namespace pd2 {
namespace {

constexpr std::uintptr_t kHugePage = std::uintptr_t{2} << 20;

// Only whole huge pages inside the memory, so that no byte outside it is affected. A refusal is no
// error: the memory is as good, only slower.
void advise_huge_pages(void* memory, std::uintptr_t bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  const std::uintptr_t begin = (address + kHugePage - 1) / kHugePage * kHugePage;
  const std::uintptr_t end = (address + bytes) / kHugePage * kHugePage;
  if (begin < end) {
    madvise(static_cast<char*>(memory) + (begin - address), end - begin, MADV_HUGEPAGE);
  }
}

// An optimizer's step goes through several buffers at once. Large ones begin at equal distances
// from large powers of two, and then their lines evict each other from caches that
// index lines by some bits of their addresses: on one processor a step took 1.7 times as long. So
// they begin at different places within every 256 KiB.
constexpr std::uintptr_t kPlaces = 8;
constexpr std::uintptr_t kBetweenPlaces = 333 * 64;  // 5.2 pages
constexpr std::uintptr_t kWithin = std::uintptr_t{256} << 10;
static_assert(kPlaces * kBetweenPlaces <= kWithin);

std::uintptr_t bytes_to_next_place(const void* memory) {
  static std::atomic<std::uintptr_t> count = 0;
  const std::uintptr_t place = count.fetch_add(1) % kPlaces * kBetweenPlaces;
  return (place - reinterpret_cast<std::uintptr_t>(memory)) % kWithin;
}

}  // namespace

at::Tensor zeros_on_huge_pages(std::int64_t numel, const at::TensorOptions& options) {
  const auto element = static_cast<std::int64_t>(options.dtype().itemsize());
  const bool is_large = static_cast<std::uintptr_t>(numel * element) >= kHugePage;
  if (!options.device().is_cpu() || !is_large) {
    return at::empty({numel}, options).zero_();
  }
  const auto more = static_cast<std::int64_t>(kWithin) / element;
  const at::Tensor all = at::empty({numel + more}, options);  // what is not written takes no room
  const auto skipped = static_cast<std::int64_t>(bytes_to_next_place(all.const_data_ptr()));
  const at::Tensor flat = all.narrow(0, skipped / element, numel);
  advise_huge_pages(flat.mutable_data_ptr(), flat.nbytes());
  return flat.zero_();
}

FlatPacking::FlatPacking(const std::vector<at::Tensor>& parameters) {
  PD2_ASSERT(!parameters.empty(), "a flat buffer needs a parameter");
  options_ = parameters.front().options().requires_grad(false);
  const std::int64_t alignment =
      alignment_bytes(options_.device()) / parameters.front().element_size();
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
