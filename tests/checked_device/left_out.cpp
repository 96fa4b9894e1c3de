#include "checked_device/left_out.h"

#include <algorithm>
#include <utility>

namespace pd2 {

void LeftOut::drop_nth(Ordering kind, std::uint64_t n, const Clock& given) {
  counts_[kind] = {0, n};
  verdict_.reset();
  wait_.reset();
  used_.clear();
  is_noting_ = n != 0;
  given_ = given;
}

std::uint64_t LeftOut::count(Ordering kind) const {
  const auto count = counts_.find(kind);
  return count == counts_.end() ? 0 : count->second.done;
}

bool LeftOut::leave_out(Ordering kind) {
  auto& count = counts_[kind];
  return ++count.done == count.dropped;
}

void LeftOut::begin_wait(const Clock& clock, const Clock& known, std::optional<Launch> at) {
  verdict_ = Verdict::implied;  // of the work that came so far: none
  is_noting_ = false;
  if (known.covers(clock)) return;
  wait_ = {clock, std::move(at)};
  std::erase_if(used_, [&](const Used& used) {
    return used.launch->is_in(known) || !used.launch->is_in(clock);
  });
}

void LeftOut::end_record(const Use& block, const Clock& known) {
  const bool is_open = !known.covers(given_) || std::ranges::any_of(used_, [&](const Used& used) {
    return conflicts(used, block, known);
  });
  verdict_ = is_open ? Verdict::open : Verdict::implied;
}

void LeftOut::add(const LaunchPtr& launch, std::span<const Use> uses) {
  if (!is_noting_) return;
  for (const Use& use : uses) used_.push_back({launch, use});
}

void LeftOut::judge(const Clock& known, std::span<const Use> uses) {
  if (!wait_ || (wait_->at && !wait_->at->is_in(known)) || known.covers(wait_->clock)) return;
  const bool is_open = !known.covers(given_) || std::ranges::any_of(uses, [&](const Use& use) {
    return std::ranges::any_of(used_,
                               [&](const Used& used) { return conflicts(used, use, known); });
  });
  verdict_ = std::max(*verdict_, is_open ? Verdict::open : Verdict::unneeded);
}

void LeftOut::forget(Address begin, Address end, const Clock* over) {
  std::erase_if(used_, [&](const Used& used) {
    return used.use.begin >= begin && used.use.begin < end &&
           (over == nullptr || used.launch->is_in(*over));
  });
}

bool LeftOut::conflicts(const Used& before, const Use& use, const Clock& known) {
  const Use& other = before.use;
  return (other.is_write || use.is_write) && other.begin < use.begin + use.bytes &&
         use.begin < other.begin + other.bytes && !before.launch->is_in(known);
}

}  // namespace pd2
