#include "checked_device/accesses.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace pd2 {

LaunchPtr AccessLog::conflict(const Use& use, const Clock& known) const {
  const Address end = use.begin + use.bytes;
  auto part = parts_.upper_bound(use.begin);
  if (part != parts_.begin()) --part;
  for (; part != parts_.end() && part->first < end; ++part) {
    if (part->second.end <= use.begin) continue;
    const auto& write = part->second.write;
    if (write && !write->is_in(known)) return write;
    if (!use.is_write) continue;
    for (const auto& read : part->second.reads) {
      if (!read->is_in(known)) return read;
    }
  }
  return nullptr;
}

void AccessLog::split(Address at) {
  auto part = parts_.upper_bound(at);
  if (part == parts_.begin()) return;
  --part;
  if (part->first == at || part->second.end <= at) return;
  parts_.emplace(at, part->second);
  part->second.end = at;
}

void AccessLog::add(const Use& use, const LaunchPtr& launch) {
  if (use.bytes == 0) return;
  const Address end = use.begin + use.bytes;
  split(use.begin);
  split(end);
  auto part = parts_.lower_bound(use.begin);
  if (use.is_write) {
    while (part != parts_.end() && part->first < end) part = parts_.erase(part);
    parts_.emplace(use.begin, Part{end, launch, {}});
    return;
  }
  Address at = use.begin;
  while (at < end) {
    if (part == parts_.end() || part->first > at) {  // bytes that nobody used before
      const Address until = part == parts_.end() ? end : std::min(end, part->first);
      part = parts_.emplace(at, Part{until, nullptr, {}}).first;
    }
    auto& reads = part->second.reads;
    const auto same = std::find_if(reads.begin(), reads.end(), [&](const LaunchPtr& read) {
      return read->stream == launch->stream;
    });
    if (same == reads.end()) {
      reads.push_back(launch);
    } else {
      *same = launch;
    }
    at = part->second.end;
    ++part;
  }
}

void AccessLog::forget(const Clock& over) {
  for (auto part = parts_.begin(); part != parts_.end();) {
    auto& [end, write, reads] = part->second;
    if (write && write->is_in(over)) write = nullptr;
    std::erase_if(reads, [&](const LaunchPtr& read) { return read->is_in(over); });
    part = write || !reads.empty() ? std::next(part) : parts_.erase(part);
  }
}

}  // namespace pd2
