#include "engine/update/version_copies.h"

#include "core/check.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace pd2 {

void VersionCopies::copy_after(std::int64_t version, std::function<void()> copy,
                               const std::function<void(Background&)>& wait) {
  {
    const std::lock_guard lock(mutex_);
    if (!thread_) {
      thread_ = std::make_unique<Background>(begin_thread_);
    }
    to_copy_.emplace(version, std::move(copy));
    if (made_ < version) {
      return;
    }
  }
  wait(*thread_);  // the version may be copied a second time
  made(version, {Fence::of(streams_.compute), Fence::of(streams_.update)});  // by one of them
}

void VersionCopies::made(std::int64_t version, std::vector<Fence> after) {
  const std::lock_guard lock(mutex_);
  made_ = version;
  const auto [first, last] = to_copy_.equal_range(version);
  if (first == last) {
    return;
  }
  std::vector<std::function<void()>> copies;
  std::transform(first, last, std::back_inserter(copies), [](auto& each) { return each.second; });
  to_copy_.erase(first, last);
  thread_->start([copies = std::move(copies), stream = streams_.copies, after = std::move(after)] {
    const OnStream guard(stream);
    for (const Fence& fence : after) {
      fence.hold_back(stream);
    }
    for (const auto& copy : copies) {
      copy();
    }
  });
}

void VersionCopies::forget_after(std::int64_t version) {
  const std::lock_guard lock(mutex_);
  to_copy_.erase(to_copy_.upper_bound(version), to_copy_.end());
}

void VersionCopies::count_from(std::int64_t newest) {
  const std::lock_guard lock(mutex_);
  PD2_ASSERT(to_copy_.empty(), "copies wait for versions that will not be made");
  made_ = newest;
}

}  // namespace pd2
