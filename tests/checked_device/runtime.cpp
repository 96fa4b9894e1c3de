#include "checked_device/runtime.h"

#include "checked_device/graph.h"
#include "checked_device/this_thread_text.h"
#include "checked_device/without_gil.h"

#include <algorithm>
#include <utility>

namespace pd2 {

Runtime& Runtime::instance() {
  static auto* const runtime = new Runtime;  // outlives the interpreter's last tensors
  return *runtime;
}

Runtime::Runtime() {
  for (int device = 0; device < kDevices; ++device) streams_.push_back({device, 0, {}, {}});
}

StreamNumber Runtime::add_stream(int device, int priority) {
  const Lock lock(mutex_);
  streams_.push_back({device, priority, {}, {}});
  return streams_.size() - 1;
}

int Runtime::device_of(StreamNumber stream) const {
  const Lock lock(mutex_);
  return streams_.at(stream).device;
}

int Runtime::priority_of(StreamNumber stream) const {
  const Lock lock(mutex_);
  return streams_.at(stream).priority;
}

Clock Runtime::clock_of(StreamNumber stream) const {
  const Lock lock(mutex_);
  return known_to(stream);
}

std::string Runtime::text_of(StreamNumber stream) const {
  const Lock lock(mutex_);
  const int device = streams_.at(stream).device;
  return "stream " + std::to_string(stream) + " of checked:" + std::to_string(device);
}

LaunchPtr Runtime::launch(StreamNumber stream, const std::string& name, std::span<const Use> uses) {
  ++num_launches_;
  return begin(stream, name, uses, false);
}

LaunchPtr Runtime::begin_transfer(StreamNumber stream, const std::string& name,
                                  std::span<const Use> uses) {
  GraphRecording::refuse(stream, "a transfer");
  return begin(stream, name, uses, true);
}

LaunchPtr Runtime::begin(StreamNumber stream, const std::string& name, std::span<const Use> uses,
                         bool is_transfer) {
  const WithoutGil nobody_waits_for_python;
  Lock lock(mutex_);
  raise_kept();
  const int device = streams_[stream].device;
  const bool is_first = used_.emplace(device, name).second;
  // The kernels of transfers were loaded when their communicator was made.
  drain_maybe(lock, device, name, {.is_first = is_first, .never = is_transfer});
  if (!is_transfer) {
    await(lock, ahead_of(stream), "'" + name + "' waits for what its stream waits for");
  }
  note(is_transfer ? Asked::Kind::transfer : Asked::Kind::launch, name, stream);
  const Clock before = ahead_of(stream);
  auto launch = next_launch(stream, name);
  if (is_transfer) {
    starts_.emplace(launch, before);
    streams_[stream].pending.push_back(launch);
  }
  try {
    check(launch, uses);
  } catch (...) {
    if (is_transfer) {
      starts_.erase(launch);
      streams_[stream].pending.pop_back();
    }
    throw;
  }
  return launch;
}

LaunchPtr Runtime::next_launch(StreamNumber stream, const std::string& name) {
  auto& clock = streams_[stream].clock;
  clock.join(over_);
  const Tick tick = clock.at(stream) + 1;
  clock.set(stream, tick);
  const auto device = std::to_string(streams_[stream].device);
  return std::make_shared<const Launch>(Launch{
      stream, tick, name,
      "stream " + std::to_string(stream) + " of checked:" + device + " by " + this_thread_text()});
}

void Runtime::note(Asked::Kind kind, const std::string& name, std::optional<StreamNumber> stream) {
  if (log_) log_->push_back({kind, name, stream, this_thread_name()});
}

void Runtime::start_log() {
  const Lock lock(mutex_);
  log_.emplace();
}

std::vector<Asked> Runtime::stop_log() {
  const Lock lock(mutex_);
  return std::exchange(log_, std::nullopt).value_or(std::vector<Asked>());
}

void Runtime::allocate(int device) {
  const WithoutGil nobody_waits_for_python;
  Lock lock(mutex_);
  drain_maybe(lock, device, "an allocation", {});
}

void Runtime::await_idle(int device, std::chrono::milliseconds timeout) {
  Lock lock(mutex_);
  const Clock all = clock_of_device(device);
  changed_.wait_for(lock, timeout, [&] { return !is_pending(all); });
}

void Runtime::drain_maybe(Lock& lock, int device, const std::string& name, const Occasion& why) {
  // Whoever drains the device keeps other threads from launching on it.
  const auto deadline = std::chrono::steady_clock::now() + timeout_;
  if (!changed_.wait_until(lock, deadline, [&] { return draining_[device] == 0; })) {
    errors_.push_back("'" + name + "' waits for a drain of the device: " + pending_text());
    throw StuckError(errors_.back());
  }
  const bool by_chance =
      drains_.probability > 0 && std::bernoulli_distribution(drains_.probability)(random_);
  if (why.never || (!by_chance && !(why.is_first && drains_.at_first_use))) return;
  ++num_drains_;
  ++draining_[device];
  try {
    await(lock, clock_of_device(device), "'" + name + "' drains checked:" + std::to_string(device));
  } catch (...) {
    --draining_[device];
    changed_.notify_all();
    throw;
  }
  --draining_[device];
  changed_.notify_all();
}

Clock Runtime::clock_of_device(int device) const {
  Clock clock;
  for (StreamNumber number = 0; number < streams_.size(); ++number) {
    if (streams_[number].device == device) clock.set(number, streams_[number].clock.at(number));
  }
  return clock;
}

Clock Runtime::known_to(StreamNumber stream) const {
  Clock known = streams_.at(stream).clock;
  known.join(over_);
  return known;
}

Clock Runtime::ahead_of(StreamNumber stream) const {
  Clock ahead = known_to(stream);
  if (has_one_queue_) ahead.join(clock_of_device(streams_[stream].device));
  return ahead;
}

bool Runtime::is_pending(const Clock& clock) const {
  for (StreamNumber number = 0; number < streams_.size(); ++number) {
    const auto& pending = streams_[number].pending;
    if (!pending.empty() && pending.front()->is_in(clock)) return true;
  }
  return false;
}

void Runtime::await(Lock& lock, const Clock& clock, const std::string& what) {
  if (!is_pending(clock)) return;
  const auto deadline = std::chrono::steady_clock::now() + timeout_;
  if (changed_.wait_until(lock, deadline, [&] { return !is_pending(clock); })) return;
  errors_.push_back(what + ", for more than " + std::to_string(timeout_.count()) + " s by " +
                    this_thread_text() + ": " + pending_text());
  throw StuckError(errors_.back());
}

std::string Runtime::pending_text() const {
  std::string text = "pending:";
  for (const auto& stream : streams_) {
    for (const auto& launch : stream.pending) text += "\n  " + launch->text();
  }
  return text;
}

void Runtime::await_turn(const LaunchPtr& transfer) {
  Lock lock(mutex_);
  const Clock before = starts_.at(transfer);
  changed_.wait(lock, [&] { return !is_pending(before); });
}

void Runtime::finish(const LaunchPtr& transfer) {
  const Lock lock(mutex_);
  auto& pending = streams_[transfer->stream].pending;
  pending.erase(std::find(pending.begin(), pending.end(), transfer));
  starts_.erase(transfer);
  changed_.notify_all();
}

void Runtime::wait(StreamNumber stream, const Clock& for_clock) {
  if (!leave_out(Ordering::stream_wait)) {
    join(stream, for_clock);
    return;
  }
  const Lock lock(mutex_);
  const Clock known = known_to(stream);
  const Tick tick = known.at(stream) + 1;
  streams_[stream].clock.set(stream, tick);
  left_out_.begin_wait(for_clock, known, Launch{stream, tick, "a wait that was left out", ""});
}

void Runtime::join(StreamNumber stream, const Clock& for_clock) {
  if (!clock_of(stream).covers(for_clock)) {
    GraphRecording::refuse(stream, "to wait for another stream");
  }
  const Lock lock(mutex_);
  auto& clock = streams_.at(stream).clock;
  if (clock.covers(for_clock)) return;
  clock.join(for_clock);
  clock.set(stream, clock.at(stream) + 1);  // an event of before does not tell that it waits
}

void Runtime::synchronize(const Clock& clock) {
  if (!leave_out(Ordering::host_wait)) {
    join_host(clock, "the host waits");
    return;
  }
  const Lock lock(mutex_);
  left_out_.begin_wait(clock, over_, std::nullopt);
}

void Runtime::join_host(const Clock& clock, const std::string& why) {
  GraphRecording::refuse_here("that the host waits");
  const WithoutGil nobody_waits_for_python;
  Lock lock(mutex_);
  note(Asked::Kind::host_wait, why, std::nullopt);
  await(lock, clock, why);
  over_.join(clock);
  host_knows_more();
  raise_kept();
}

void Runtime::synchronize_stream(StreamNumber stream) { synchronize(clock_of(stream)); }

void Runtime::synchronize_device(int device) {
  Clock clock;
  {
    const Lock lock(mutex_);
    clock = clock_of_device(device);
  }
  synchronize(clock);
}

bool Runtime::query(const Clock& clock) {
  const Lock lock(mutex_);
  if (is_pending(clock)) return false;
  if (!over_.covers(clock) && std::bernoulli_distribution()(random_)) return false;  // not yet
  over_.join(clock);
  host_knows_more();
  return true;
}

bool Runtime::is_over(const Clock& clock) const {
  const Lock lock(mutex_);
  return !is_pending(clock);
}

}  // namespace pd2
