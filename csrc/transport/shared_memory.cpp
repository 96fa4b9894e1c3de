#include "transport/shared_memory.h"

#include <cerrno>
#include <climits>
#include <cstdio>
#include <ctime>
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <random>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <utility>

namespace pd2 {
namespace {

int descriptor_of(int process) { return static_cast<int>(syscall(SYS_pidfd_open, process, 0)); }

bool can_watch_processes() {
  const int self = descriptor_of(getpid());
  return self >= 0 && close(self) == 0;
}

// Process numbers mean something within one namespace only.
unsigned long long process_namespace() {
  struct stat status {};
  return stat("/proc/self/ns/pid", &status) == 0 ? status.st_ino : 0;
}

// A cookie follows the data, by which other processes know the memory: the numbers of a process and
// of a file may agree by chance.
std::size_t position_of_cookie(std::size_t bytes) {
  return (bytes + sizeof(std::uint64_t) - 1) / sizeof(std::uint64_t) * sizeof(std::uint64_t);
}

std::size_t bytes_with_cookie(std::size_t bytes) {
  return position_of_cookie(bytes) + sizeof(std::uint64_t);
}

}  // namespace

std::unique_ptr<SharedMemory> SharedMemory::create(std::size_t bytes) {
  if (!can_watch_processes()) {
    return nullptr;
  }
  const int file = memfd_create("pipedream2bw", MFD_CLOEXEC);
  if (file < 0) {
    return nullptr;
  }
  if (ftruncate(file, static_cast<off_t>(bytes_with_cookie(bytes))) != 0) {
    close(file);
    return nullptr;
  }
  std::unique_ptr<SharedMemory> memory = map(file, bytes, getpid());
  if (!memory) {
    return nullptr;
  }
  std::random_device random;
  memory->cookie() = std::uint64_t{random()} << 32 | random();
  char address[120];
  std::snprintf(address, sizeof address, "%llu/%d/%d/%zu/%llu", process_namespace(), memory->maker_,
                file, bytes, static_cast<unsigned long long>(memory->cookie()));
  memory->address_ = address;
  return memory;
}

std::unique_ptr<SharedMemory> SharedMemory::open(const std::string& address) {
  int process = 0, number = 0;
  std::size_t bytes = 0;
  unsigned long long name_space = 0, cookie = 0;
  if (std::sscanf(address.c_str(), "%llu/%d/%d/%zu/%llu", &name_space, &process, &number, &bytes,
                  &cookie) != 5 ||
      name_space != process_namespace() || !can_watch_processes()) {
    return nullptr;
  }
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/fd/%d", process, number);
  // It may be another machine's process of that number, with any kind of file.
  struct stat status {};
  const auto file_bytes = static_cast<off_t>(bytes_with_cookie(bytes));
  if (stat(path, &status) != 0 || !S_ISREG(status.st_mode) || status.st_size != file_bytes) {
    return nullptr;
  }
  const int file = ::open(path, O_RDWR | O_CLOEXEC);
  if (file < 0) {
    return nullptr;
  }
  std::unique_ptr<SharedMemory> memory = map(file, bytes, process);
  return memory && memory->cookie() == cookie ? std::move(memory) : nullptr;
}

// Null if there is no room for it; takes ownership of the file.
std::unique_ptr<SharedMemory> SharedMemory::map(int file, std::size_t bytes, int maker) {
  void* const data =
      mmap(nullptr, bytes_with_cookie(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (data == MAP_FAILED) {
    close(file);
    return nullptr;
  }
  return std::unique_ptr<SharedMemory>(
      new SharedMemory(file, static_cast<std::byte*>(data), bytes, maker));
}

SharedMemory::~SharedMemory() {
  munmap(data_, bytes_with_cookie(bytes_));
  close(file_);
}

std::uint64_t& SharedMemory::cookie() const {
  return *reinterpret_cast<std::uint64_t*>(data_ + position_of_cookie(bytes_));
}

WatchedProcess::WatchedProcess(int number)
    : descriptor_(descriptor_of(number)), had_ended_(descriptor_ < 0 && errno == ESRCH) {}

WatchedProcess::~WatchedProcess() {
  if (descriptor_ >= 0) {
    close(descriptor_);
  }
}

bool WatchedProcess::has_ended() const {
  pollfd process{descriptor_, POLLIN, 0};
  return had_ended_ || poll(&process, 1, 0) > 0;  // poll passes over what is no descriptor
}

int number_of_this_process() { return getpid(); }

void sleep_while(const std::atomic<std::uint32_t>& word, std::uint32_t value,
                 std::chrono::nanoseconds longest) {
  const auto seconds = std::chrono::floor<std::chrono::seconds>(longest);
  const timespec timeout{seconds.count(), (longest - seconds).count()};
  syscall(SYS_futex, &word, FUTEX_WAIT, value, &timeout, nullptr, 0);
}

void wake(const std::atomic<std::uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace pd2
