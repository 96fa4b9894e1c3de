// The checked device: streams whose operators run at once, and clocks that check their order.

#pragma once

#include "checked_device/accesses.h"
#include "checked_device/clock.h"
#include "checked_device/left_out.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace pd2 {

// Two accesses that nothing orders.
class RaceError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// What the device waits for did not come in time.
class StuckError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A recorded event.
struct Moment {
  Clock clock;
  std::chrono::steady_clock::time_point recorded;
  std::uint64_t graph = 0;  // see GraphRecording::of_event()
};

// What a host thread has asked of the device.
struct Asked {
  enum class Kind { launch, transfer, host_wait };  // host_wait: that the thread itself waits
  Kind kind;
  std::string name;                    // of the operator; of a wait, what it is for
  std::optional<StreamNumber> stream;  // none: a wait
  std::string thread;                  // its name
};

struct DrainSettings {
  bool at_first_use = true;  // of an operator on a device, as CUDA loads its kernel then
  double probability = 0.0;  // of a drain before any operator's launch or allocation
  std::uint64_t seed = 0;
};

// All devices of the process. Thread-safe; no call holds the lock while it waits, nor Python's.
//
// What a host thread has waited for is known to all launches that come later in time, by whatever
// thread: that thread could only be told through memory or a lock, and so is right on a GPU too.
class Runtime {
 public:
  static constexpr int kDevices = 4;

  static Runtime& instance();

  // --- streams: the default ones have the numbers of their devices
  StreamNumber add_stream(int device, int priority);
  int device_of(StreamNumber stream) const;
  int priority_of(StreamNumber stream) const;
  Clock clock_of(StreamNumber stream) const;
  std::string text_of(StreamNumber stream) const;

  // --- launches. They throw RaceError, and StuckError where they had to wait for too long.
  // An operator, which the caller runs next: waits until the transfers are over that come before.
  LaunchPtr launch(StreamNumber stream, const std::string& name, std::span<const Use> uses);
  // To what the launch has allocated since.
  void add_writes(const LaunchPtr& launch, std::span<const Use> uses);
  // A transfer, which the caller runs in another thread and ends with finish().
  LaunchPtr begin_transfer(StreamNumber stream, const std::string& name, std::span<const Use> uses);
  // Waits, without a limit, until the transfer's turn comes.
  void await_turn(const LaunchPtr& transfer);
  void finish(const LaunchPtr& transfer);

  // Until all that was launched on the device is over, or for so long. This orders nothing.
  void await_idle(int device, std::chrono::milliseconds timeout);
  // Memory of the device is about to be given out, for which a device may have to be drained.
  void allocate(int device);

  // --- order
  void wait(StreamNumber stream, const Clock& for_clock);
  void synchronize(const Clock& clock);
  // The same, of what is no call of its own and cannot be left out.
  void join(StreamNumber stream, const Clock& for_clock);
  void join_host(const Clock& clock, const std::string& why);
  void synchronize_stream(StreamNumber stream);
  void synchronize_device(int device);
  // Whether it is over; if so, the host knows it from now on. At random it says: not yet.
  bool query(const Clock& clock);
  bool is_over(const Clock& clock) const;

  // --- memory
  void add_memory(Address begin, std::size_t bytes);
  void remove_memory(Address begin);
  // By the host itself, of pinned memory: what was launched on it must be known to be over. The
  // error is kept for the next launch if it cannot be thrown.
  void check_host_access(const Use& use, const std::string& name);
  // Checks that all that used the block is over for the stream, and forgets it. `lacks_record`: a
  // record_stream of it was left out.
  void reuse_memory(Address begin, std::size_t bytes, StreamNumber stream, bool lacks_record);
  // The stream has the block from now on: a write, at its last launch or wait.
  void give_memory(Address begin, std::size_t bytes, StreamNumber stream);
  void forget(Address begin, const Clock& over);

  // --- copies with pinned memory of the host, which code may use that no operator sees
  // What the stream's last launch has written there: the host has it when it knows that this is
  // over. Until then there is poison.
  void hold_back(StreamNumber stream, std::span<std::byte> written);
  // What it has read there: it must not change before.
  void watch(StreamNumber stream, std::span<std::byte> read);
  // Lets the stream read there what streams have written.
  void hand_over(std::span<std::byte> memory);

  // --- tests
  void set_drains(const DrainSettings& settings);
  void set_timeout(std::chrono::duration<double> timeout);
  // Whether all streams of a device share one queue of the hardware: whatever it is given begins
  // when all that it was given before is over. This orders nothing.
  void set_one_queue(bool is_one);
  // Leaves out the n-th ordering of this kind from now on, counted from 1; 0 leaves out none.
  void drop_nth(Ordering kind, std::uint64_t n);
  std::uint64_t count(Ordering kind) const;
  // Counts one; true if it must be left out.
  bool leave_out(Ordering kind);
  // A record_stream was; `is_twice`: the memory is kept for the stream without it.
  void leave_out_record(bool is_twice);
  // nullopt if none was left out.
  std::optional<Verdict> verdict() const;
  std::vector<std::string> errors() const;
  // Of a thread that cannot throw it.
  void report(const std::string& error);
  void clear_errors();
  std::uint64_t num_drains() const;
  // Launches by hosts: operators, copies, kernels, and a whole graph as one.
  std::uint64_t num_launches() const { return num_launches_; }
  // So many were one.
  void count_as_one(std::uint64_t launches) { num_launches_ -= launches - 1; }
  // All that is asked from now on, until stop_log() gives it.
  void start_log();
  std::vector<Asked> stop_log();

 private:
  using Lock = std::unique_lock<std::mutex>;

  struct Stream {
    int device;
    int priority;
    Clock clock;
    std::deque<LaunchPtr> pending;  // transfers that are not over
  };

  Runtime();

  LaunchPtr begin(StreamNumber stream, const std::string& name, std::span<const Use> uses,
                  bool is_transfer);
  LaunchPtr next_launch(StreamNumber stream, const std::string& name);
  struct Occasion {
    bool is_first = false, never = false;
  };
  void note(Asked::Kind kind, const std::string& name, std::optional<StreamNumber> stream);
  void drain_maybe(Lock& lock, int device, const std::string& name, const Occasion& why);
  void await(Lock& lock, const Clock& clock, const std::string& what);
  bool is_pending(const Clock& clock) const;
  AccessLog* log_of(const Use& use);
  void check(const LaunchPtr& launch, std::span<const Use> uses);
  void raise_kept();
  std::string pending_text() const;
  Clock known_to(StreamNumber stream) const;
  // What the stream's next launch begins after.
  Clock ahead_of(StreamNumber stream) const;
  Clock clock_of_device(int device) const;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Stream> streams_;
  Clock over_;                         // known to be over by a host thread
  std::map<LaunchPtr, Clock> starts_;  // of pending transfers: what comes before
  struct Memory {
    Address end;
    AccessLog log;
  };
  std::map<Address, Memory> memory_;
  struct HostCopy {
    Clock clock;
    std::span<std::byte> memory;
    std::vector<std::byte> bytes;
    bool is_write;
  };
  void host_knows_more();
  std::vector<HostCopy> host_copies_;  // that the host does not know to be over

  DrainSettings drains_;
  bool has_one_queue_ = false;
  std::mt19937_64 random_;
  std::set<std::pair<int, std::string>> used_;
  std::vector<int> draining_ = std::vector<int>(kDevices, 0);
  std::uint64_t num_drains_ = 0;
  std::atomic<std::uint64_t> num_launches_ = 0;
  std::chrono::duration<double> timeout_{60.0};

  LeftOut left_out_;
  std::optional<std::vector<Asked>> log_;  // none: nobody looks
  std::vector<std::string> errors_;
  std::optional<std::string> kept_;  // an error that could not be thrown where it was found
};

}  // namespace pd2
