// What uses which bytes, and whether it may.
#include "checked_device/runtime.h"
#include "checked_device/this_thread_text.h"

#include <algorithm>
#include <utility>

namespace pd2 {

AccessLog* Runtime::log_of(const Use& use) {
  auto memory = memory_.upper_bound(use.begin);
  if (memory == memory_.begin()) return nullptr;
  --memory;
  return use.begin < memory->second.end ? &memory->second.log : nullptr;
}

void Runtime::check(const LaunchPtr& launch, std::span<const Use> uses) {
  const Clock known = known_to(launch->stream);
  left_out_.judge(known, uses);
  left_out_.add(launch, uses);
  std::string error;
  for (const Use& use : uses) {
    const auto* log = log_of(use);
    const auto other = log == nullptr ? nullptr : log->conflict(use, known);
    if (!other) continue;
    error = std::string("race: ") + launch->text() + (use.is_write ? " writes" : " reads") +
            " memory beside " + other->text() + ": nothing orders them";
    break;
  }
  for (const Use& use : uses) {
    if (auto* log = log_of(use)) log->add(use, launch);
  }
  if (error.empty()) return;
  errors_.push_back(error);
  throw RaceError(error);
}

void Runtime::add_writes(const LaunchPtr& launch, std::span<const Use> uses) {
  const Lock lock(mutex_);
  left_out_.add(launch, uses);
  for (const Use& use : uses) {
    if (auto* log = log_of(use)) log->add(use, launch);
  }
}

void Runtime::raise_kept() {
  if (!kept_) return;
  const std::string error = *std::exchange(kept_, std::nullopt);
  throw RaceError(error);
}

void Runtime::add_memory(Address begin, std::size_t bytes) {
  const Lock lock(mutex_);
  memory_[begin] = {begin + bytes, {}};
}

void Runtime::remove_memory(Address begin) {
  const Lock lock(mutex_);
  const Address end = memory_.at(begin).end;
  memory_.erase(begin);
  left_out_.forget(begin, end, nullptr);
  std::erase_if(host_copies_, [&](const HostCopy& copy) {
    const auto address = reinterpret_cast<Address>(copy.memory.data());
    return begin <= address && address < end;
  });
}

void Runtime::hold_back(StreamNumber stream, std::span<std::byte> written) {
  hand_over(written);
  const Lock lock(mutex_);
  host_copies_.push_back(
      {known_to(stream), written, {written.begin(), written.end()}, /*is_write=*/true});
  std::ranges::fill(written, std::byte{0xff});
}

void Runtime::watch(StreamNumber stream, std::span<std::byte> read) {
  const Lock lock(mutex_);
  host_copies_.push_back({known_to(stream), read, {read.begin(), read.end()}, /*is_write=*/false});
}

void Runtime::hand_over(std::span<std::byte> memory) {
  const Lock lock(mutex_);
  std::erase_if(host_copies_, [&](const HostCopy& copy) {
    const bool is_there = copy.memory.data() < memory.data() + memory.size() &&
                          memory.data() < copy.memory.data() + copy.memory.size();
    if (is_there && copy.is_write) std::ranges::copy(copy.bytes, copy.memory.begin());
    return is_there && copy.is_write;
  });
}

void Runtime::host_knows_more() {
  std::erase_if(host_copies_, [&](const HostCopy& copy) {
    if (!over_.covers(copy.clock)) return false;
    if (copy.is_write) {
      std::ranges::copy(copy.bytes, copy.memory.begin());
    } else if (!std::ranges::equal(copy.bytes, copy.memory)) {
      errors_.push_back(
          "race: pinned memory was written before a copy from it was over, as the "
          "host found by " +
          this_thread_text());
      kept_ = errors_.back();
    }
    return true;
  });
}

void Runtime::check_host_access(const Use& use, const std::string& name) {
  const Lock lock(mutex_);
  left_out_.judge(over_, {&use, 1});
  const auto* log = log_of(use);
  const auto other = log == nullptr ? nullptr : log->conflict(use, over_);
  if (!other) return;
  errors_.push_back("race: the host's '" + name + "' by " + this_thread_text() +
                    (use.is_write ? " writes" : " reads") + " pinned memory beside " +
                    other->text() + ": the host has not waited for it");
  kept_ = errors_.back();
}

void Runtime::reuse_memory(Address begin, std::size_t bytes, StreamNumber stream,
                           bool lacks_record) {
  const Lock lock(mutex_);
  auto& log = memory_.at(begin).log;
  const Use block{begin, bytes, true};
  const Clock known = known_to(stream);
  left_out_.judge(known, {&block, 1});
  if (lacks_record) left_out_.end_record(block, known);
  const auto other = log.conflict(block, known);
  log.clear();
  if (!other) return;
  errors_.push_back("race: an allocation on stream " + std::to_string(stream) + " by " +
                    this_thread_text() + " may get freed memory beside " + other->text() +
                    ": no record_stream, and nothing orders them");
  throw RaceError(errors_.back());
}

void Runtime::give_memory(Address begin, std::size_t bytes, StreamNumber stream) {
  const Lock lock(mutex_);
  auto& clock = streams_.at(stream).clock;
  const auto device = std::to_string(streams_[stream].device);
  const auto launch = std::make_shared<const Launch>(Launch{
      stream, clock.at(stream), "allocation",
      "stream " + std::to_string(stream) + " of checked:" + device + " by " + this_thread_text()});
  memory_.at(begin).log.add({begin, bytes, true}, launch);
}

void Runtime::forget(Address begin, const Clock& over) {
  const Lock lock(mutex_);
  auto& memory = memory_.at(begin);
  memory.log.forget(over);
  left_out_.forget(begin, memory.end, &over);
}

void Runtime::set_drains(const DrainSettings& settings) {
  const Lock lock(mutex_);
  drains_ = settings;
  random_.seed(settings.seed);
}

void Runtime::set_one_queue(bool is_one) {
  const Lock lock(mutex_);
  has_one_queue_ = is_one;
}

void Runtime::set_timeout(std::chrono::duration<double> timeout) {
  const Lock lock(mutex_);
  timeout_ = timeout;
}

void Runtime::drop_nth(Ordering kind, std::uint64_t n) {
  const Lock lock(mutex_);
  Clock given;
  for (StreamNumber stream = 0; stream < streams_.size(); ++stream) {
    given.set(stream, streams_[stream].clock.at(stream));
  }
  left_out_.drop_nth(kind, n, given);
}

std::uint64_t Runtime::count(Ordering kind) const {
  const Lock lock(mutex_);
  return left_out_.count(kind);
}

bool Runtime::leave_out(Ordering kind) {
  const Lock lock(mutex_);
  return left_out_.leave_out(kind);
}

void Runtime::leave_out_record(bool is_twice) {
  const Lock lock(mutex_);
  left_out_.begin_record(is_twice);
}

std::optional<Verdict> Runtime::verdict() const {
  const Lock lock(mutex_);
  return left_out_.verdict();
}

std::vector<std::string> Runtime::errors() const {
  const Lock lock(mutex_);
  return errors_;
}

void Runtime::report(const std::string& error) {
  const Lock lock(mutex_);
  errors_.push_back(error);
}

void Runtime::clear_errors() {
  const Lock lock(mutex_);
  errors_.clear();
  kept_.reset();
}

std::uint64_t Runtime::num_drains() const {
  const Lock lock(mutex_);
  return num_drains_;
}

}  // namespace pd2
