// Memory that processes of one machine share, and what they need to wait for each other in it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace pd2 {

// Belongs to no file: it is gone when no process has it any more, however they ended.
class SharedMemory {
 public:
  // Zeroed; it takes up room where it is first written to. Null where the system cannot do it:
  // Linux from 5.3 on can.
  static std::unique_ptr<SharedMemory> create(std::size_t bytes);
  // Another process's memory, while that one has it. Null if it cannot be reached: another
  // machine, container or user.
  static std::unique_ptr<SharedMemory> open(const std::string& address);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // For open(); of memory that was made here.
  const std::string& address() const { return address_; }
  // The number of the process that made it.
  int maker() const { return maker_; }
  std::byte* data() const { return data_; }  // at the beginning of a page

 private:
  static std::unique_ptr<SharedMemory> map(int file, std::size_t bytes, int maker);
  SharedMemory(int file, std::byte* data, std::size_t bytes, int maker)
      : file_(file), data_(data), bytes_(bytes), maker_(maker) {}
  std::uint64_t& cookie() const;

  const int file_;
  std::byte* const data_;
  const std::size_t bytes_;
  const int maker_;
  std::string address_;
};

// A process of this machine, to see whether it still runs.
class WatchedProcess {
 public:
  explicit WatchedProcess(int number);
  ~WatchedProcess();
  WatchedProcess(const WatchedProcess&) = delete;
  WatchedProcess& operator=(const WatchedProcess&) = delete;

  bool has_ended() const;

 private:
  const int descriptor_;
  const bool had_ended_;
};

int number_of_this_process();

// C++'s own waiting on an atomic works within one process only. Returns when somebody calls wake(),
// at once if `word` is not `value`, after `longest`, and now and then for no reason.
void sleep_while(const std::atomic<std::uint32_t>& word, std::uint32_t value,
                 std::chrono::nanoseconds longest);
// Wakes all that sleep.
void wake(const std::atomic<std::uint32_t>& word);

// A process that ends wakes nobody, and a thread that ends another one's waiting may miss it just
// before it sleeps: so waiting threads wake up this often to look.
constexpr std::chrono::milliseconds kLongestSleep(100);

static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

}  // namespace pd2
