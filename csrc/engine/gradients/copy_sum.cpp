#include "engine/gradients/copy_sum.h"

#include "core/check.h"

#include <utility>

namespace pd2 {

void CopySum::Pending::end_with(int copy, at::Tensor flat) {
  PD2_ASSERT(copy != copy_, "copy ", copy, " came twice");
  at::Tensor& first = copy_ == 0 ? flat_ : flat;
  at::Tensor& second = copy_ == 0 ? flat : flat_;
  first.add_(second.to(first.device()));
  second.copy_(first);
  finish();
}

c10::intrusive_ptr<c10d::Work> CopySum::add(int copy, std::size_t buffer, const at::Tensor& flat) {
  const std::lock_guard lock(mutex_);
  const auto [place, is_first] = pending_.try_emplace(buffer);
  if (is_first) {
    place->second = c10::make_intrusive<Pending>(copy, flat);
    return place->second;
  }
  const auto pending = std::move(place->second);
  pending_.erase(place);
  pending->end_with(copy, flat);
  return pending;
}

}  // namespace pd2
