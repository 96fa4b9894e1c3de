#include "transport/shared_ring.h"

#include <chrono>
#include <cstdio>
#include <new>
#include <random>
#include <stdexcept>
#include <thread>

#ifdef __linux__
#include <climits>
#include <ctime>
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace pd2 {
namespace {

constexpr std::chrono::microseconds kLooking(100);

// An aborting thread may miss the one that is about to sleep: it wakes up by itself.
[[maybe_unused]] constexpr std::chrono::milliseconds kLongestSleep(100);

constexpr std::size_t kPage = 4096;

}  // namespace

// The two ends' words lie on cache lines of their own. All are lock-free, so the address at which a
// process maps them does not matter.
struct SharedRing::Shared {
  std::uint64_t cookie;
  std::atomic<int> reader;                         // its process, 0 before there is one
  alignas(64) std::atomic<std::uint32_t> written;  // messages, modulo 2^32
  std::atomic<std::uint32_t> reader_sleeps;
  alignas(64) std::atomic<std::uint32_t> read;
  std::atomic<std::uint32_t> writer_sleeps;

  // Follows in the memory: by number of the message modulo num_slots.
  std::uint32_t* slot_of_message() { return reinterpret_cast<std::uint32_t*>(this + 1); }

  static std::size_t header_bytes(std::uint32_t num_slots) {
    const std::size_t bytes = sizeof(Shared) + num_slots * sizeof(std::uint32_t);
    return (bytes + kPage - 1) / kPage * kPage;
  }
  static std::size_t bytes(std::uint32_t num_slots) {
    return header_bytes(num_slots) + num_slots * kMaxMessageBytes;
  }
};

static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

#ifdef __linux__

namespace {

// C++'s own waiting works within one process only.
void sleep_while(const std::atomic<std::uint32_t>& word, std::uint32_t value) {
  const timespec timeout{0, std::chrono::nanoseconds(kLongestSleep).count()};
  syscall(SYS_futex, &word, FUTEX_WAIT, value, &timeout, nullptr, 0);
}

void wake(const std::atomic<std::uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

int descriptor_of(int process) { return static_cast<int>(syscall(SYS_pidfd_open, process, 0)); }

// Process numbers mean something within one namespace only.
unsigned long long process_namespace() {
  struct stat status {};
  return stat("/proc/self/ns/pid", &status) == 0 ? status.st_ino : 0;
}

}  // namespace

std::unique_ptr<SharedRing> SharedRing::create(std::uint32_t num_slots, Timeout timeout) {
  const int self = descriptor_of(getpid());  // only to see whether the other end can do it
  if (self < 0) {
    return nullptr;
  }
  close(self);
  const int file = memfd_create("pipedream2bw", MFD_CLOEXEC);
  if (file < 0) {
    return nullptr;
  }
  // The file is sparse: memory is taken when a slot is first used.
  if (ftruncate(file, static_cast<off_t>(Shared::bytes(num_slots))) != 0) {
    close(file);
    return nullptr;
  }
  std::unique_ptr<SharedRing> ring = map(file, num_slots, timeout);
  if (!ring) {
    return nullptr;
  }
  std::random_device random;  // where the number of a process and of a file agree by chance
  new (ring->shared_) Shared{};
  const std::uint64_t cookie = std::uint64_t{random()} << 32 | random();
  ring->shared_->cookie = cookie;
  char address[120];
  std::snprintf(address, sizeof address, "%llu/%d/%d/%u/%llu", process_namespace(),
                static_cast<int>(getpid()), file, num_slots,
                static_cast<unsigned long long>(cookie));
  ring->address_ = address;
  for (std::uint32_t index = num_slots; index-- > 0;) {
    ring->free_slots_.push_back(index);
  }
  return ring;
}

std::unique_ptr<SharedRing> SharedRing::open(const std::string& address, Timeout timeout) {
  int process = 0, number = 0;
  unsigned num_slots = 0;
  unsigned long long name_space = 0, cookie = 0;
  if (std::sscanf(address.c_str(), "%llu/%d/%d/%u/%llu", &name_space, &process, &number, &num_slots,
                  &cookie) != 5 ||
      name_space != process_namespace()) {
    return nullptr;
  }
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/fd/%d", process, number);
  // It may be another machine's process of that number, with any kind of file.
  struct stat status {};
  const auto bytes = static_cast<off_t>(Shared::bytes(num_slots));
  if (stat(path, &status) != 0 || !S_ISREG(status.st_mode) || status.st_size != bytes) {
    return nullptr;
  }
  const int file = ::open(path, O_RDWR | O_CLOEXEC);
  if (file < 0) {
    return nullptr;
  }
  std::unique_ptr<SharedRing> ring = map(file, num_slots, timeout);
  if (!ring) {
    return nullptr;
  }
  ring->peer_ = descriptor_of(process);
  if (ring->peer_ < 0 || ring->shared_->cookie != cookie) {
    return nullptr;
  }
  ring->shared_->reader.store(getpid());
  return ring;
}

// Null where there is no room for it; takes the file over.
std::unique_ptr<SharedRing> SharedRing::map(int file, std::uint32_t num_slots, Timeout timeout) {
  void* const memory =
      mmap(nullptr, Shared::bytes(num_slots), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) {
    close(file);
    return nullptr;
  }
  return std::unique_ptr<SharedRing>(
      new SharedRing(file, num_slots, static_cast<Shared*>(memory), timeout));
}

SharedRing::~SharedRing() {
  munmap(shared_, Shared::bytes(num_slots_));
  close(file_);
  if (peer_ >= 0) {
    close(peer_);
  }
}

void SharedRing::check_peer() {
  if (peer_ < 0) {
    const int reader = shared_->reader.load();
    peer_ = reader == 0 ? -1 : descriptor_of(reader);
    if (peer_ < 0) {
      return;
    }
  }
  pollfd process{peer_, POLLIN, 0};
  if (poll(&process, 1, 0) > 0) {
    throw std::runtime_error("the process at the other end of a channel has ended");
  }
}

#else

namespace {

void sleep_while(const std::atomic<std::uint32_t>&, std::uint32_t) {}
void wake(const std::atomic<std::uint32_t>&) {}

}  // namespace

std::unique_ptr<SharedRing> SharedRing::create(std::uint32_t, Timeout) { return nullptr; }
std::unique_ptr<SharedRing> SharedRing::open(const std::string&, Timeout) { return nullptr; }
SharedRing::~SharedRing() = default;
void SharedRing::check_peer() {}

#endif

SharedRing::SharedRing(int file, std::uint32_t num_slots, Shared* shared, Timeout timeout)
    : file_(file),
      num_slots_(num_slots),
      timeout_(timeout),
      shared_(shared),
      used_by_slot_(num_slots) {}

std::byte* SharedRing::slot(std::uint32_t index) {
  return reinterpret_cast<std::byte*>(shared_) + Shared::header_bytes(num_slots_) +
         index * kMaxMessageBytes;
}

void SharedRing::use(std::uint32_t index, std::size_t bytes) {
  std::size_t& used = used_by_slot_[index];
  if (bytes > used) {
    used_bytes_.fetch_add(bytes - used, std::memory_order_relaxed);
    used = bytes;
  }
}

// A waiting end says that it sleeps and then looks once more; the other end changes the word and
// then looks whether somebody sleeps. In the one order of such operations one of them sees the
// other's.
bool SharedRing::wait_while(const std::atomic<std::uint32_t>& word, std::uint32_t value,
                            std::atomic<std::uint32_t>& sleeping) {
  const auto start = std::chrono::steady_clock::now();
  while (word.load(std::memory_order_acquire) == value) {
    if (aborted_.load(std::memory_order_relaxed)) {
      return false;
    }
    if (std::chrono::steady_clock::now() < start + kLooking) {
      std::this_thread::yield();  // whoever is waited for may need this core
      continue;
    }
    sleeping.store(1);
    if (word.load() == value) {
      sleep_while(word, value);
    }
    sleeping.store(0);
    if (word.load() == value) {
      check_peer();
      if (std::chrono::steady_clock::now() - start > timeout_) {
        throw std::runtime_error(
            "timeout: nothing came from the process at the other end of a "
            "channel for " +
            std::to_string(timeout_.count()) + " seconds");
      }
    }
  }
  return !aborted_.load(std::memory_order_relaxed);
}

std::byte* SharedRing::begin_write(std::size_t bytes) {
  // All slots are taken while `read` is num_slots behind the next message.
  if (!wait_while(shared_->read, next_ - num_slots_, shared_->writer_sleeps)) {
    return nullptr;
  }
  for (const std::uint32_t read = shared_->read.load(std::memory_order_acquire); reclaimed_ != read;
       ++reclaimed_) {
    free_slots_.push_back(shared_->slot_of_message()[reclaimed_ % num_slots_]);
  }
  use(free_slots_.back(), bytes);
  return slot(free_slots_.back());
}

void SharedRing::end_write() {
  shared_->slot_of_message()[next_ % num_slots_] = free_slots_.back();
  free_slots_.pop_back();
  shared_->written.store(++next_);
  if (shared_->reader_sleeps.load() != 0) {
    wake(shared_->written);
  }
}

const std::byte* SharedRing::begin_read(std::size_t bytes) {
  if (!wait_while(shared_->written, next_, shared_->reader_sleeps)) {
    return nullptr;
  }
  const std::uint32_t index = shared_->slot_of_message()[next_ % num_slots_];
  use(index, bytes);
  return slot(index);
}

void SharedRing::end_read() {
  shared_->read.store(++next_);
  if (shared_->writer_sleeps.load() != 0) {
    wake(shared_->read);
  }
}

void SharedRing::abort() {
  aborted_.store(true, std::memory_order_relaxed);
  wake(shared_->written);
  wake(shared_->read);
}

}  // namespace pd2
