#include "engine/weights/huge_pages.h"

#include <ATen/ops/empty.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

#include <atomic>
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

}  // namespace pd2
