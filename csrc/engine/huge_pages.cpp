#include "engine/huge_pages.h"

#include <ATen/ops/empty.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

#include <cstdint>

namespace pd2 {
namespace {

constexpr std::uintptr_t kHugePage = std::uintptr_t{2} << 20;

// Only whole huge pages inside the memory, so that no byte outside it is affected. A refusal is no
// error: the memory is as good, only slower.
void advise_huge_pages([[maybe_unused]] void* memory, [[maybe_unused]] std::uintptr_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  const std::uintptr_t begin = (address + kHugePage - 1) / kHugePage * kHugePage;
  const std::uintptr_t end = (address + bytes) / kHugePage * kHugePage;
  if (begin < end) {
    madvise(static_cast<char*>(memory) + (begin - address), end - begin, MADV_HUGEPAGE);
  }
#endif
}

}  // namespace

at::Tensor zeros_on_huge_pages(std::int64_t numel, const at::TensorOptions& options) {
  at::Tensor flat = at::empty({numel}, options);
  if (flat.is_cpu()) advise_huge_pages(flat.mutable_data_ptr(), flat.nbytes());
  return flat.zero_();
}

}  // namespace pd2
