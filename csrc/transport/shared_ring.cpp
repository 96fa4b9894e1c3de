#include "transport/shared_ring.h"

#include "transport/peer_error.h"

#include <new>
#include <thread>
#include <utility>

namespace pd2 {
namespace {

constexpr std::chrono::microseconds kLooking(100);

constexpr std::size_t kPage = 4096;

}  // namespace

// The two ends' words lie on different cache lines. All are lock-free, so the address at which a
// process maps them does not matter.
struct SharedRing::Shared {
  std::uint32_t num_slots;
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

std::unique_ptr<SharedRing> SharedRing::create(std::uint32_t num_slots, Timeout timeout) {
  std::unique_ptr<SharedMemory> memory = SharedMemory::create(Shared::bytes(num_slots));
  if (!memory) {
    return nullptr;
  }
  (new (memory->data()) Shared{})->num_slots = num_slots;
  std::unique_ptr<SharedRing> ring(new SharedRing(std::move(memory), timeout));
  for (std::uint32_t index = num_slots; index-- > 0;) {
    ring->free_slots_.push_back(index);
  }
  return ring;
}

std::unique_ptr<SharedRing> SharedRing::open(const std::string& address, Timeout timeout) {
  std::unique_ptr<SharedMemory> memory = SharedMemory::open(address);
  if (!memory) {
    return nullptr;
  }
  std::unique_ptr<SharedRing> ring(new SharedRing(std::move(memory), timeout));
  ring->peer_.emplace(ring->memory_->maker());
  ring->shared_->reader.store(number_of_this_process());
  return ring;
}

SharedRing::SharedRing(std::unique_ptr<SharedMemory> memory, Timeout timeout)
    : memory_(std::move(memory)),
      shared_(reinterpret_cast<Shared*>(memory_->data())),
      num_slots_(shared_->num_slots),
      timeout_(timeout),
      used_by_slot_(num_slots_) {}

bool SharedRing::peer_has_ended() {
  const int reader = peer_ ? 0 : shared_->reader.load();
  if (reader != 0) {
    peer_.emplace(reader);
  }
  return peer_ && peer_->has_ended();
}

std::byte* SharedRing::slot(std::uint32_t index) {
  return memory_->data() + Shared::header_bytes(num_slots_) + index * kMaxMessageBytes;
}

void SharedRing::use(std::uint32_t index, std::size_t bytes) {
  std::size_t& used = used_by_slot_[index];
  if (bytes > used) {
    used_bytes_.fetch_add(bytes - used, std::memory_order_relaxed);
    used = bytes;
  }
}

// A waiting end says that it sleeps and then looks once more; the other end changes the word and
// then looks whether the other end sleeps. In the one order of such operations one of them sees the
// other's.
bool SharedRing::wait_while(const std::atomic<std::uint32_t>& word, std::uint32_t value,
                            std::atomic<std::uint32_t>& sleeping) {
  const auto start = std::chrono::steady_clock::now();
  while (word.load(std::memory_order_acquire) == value) {
    if (aborted_.load(std::memory_order_relaxed)) {
      return false;
    }
    if (std::chrono::steady_clock::now() < start + kLooking) {
      std::this_thread::yield();  // the other end may need this core
      continue;
    }
    sleeping.store(1);
    if (word.load() == value) {
      sleep_while(word, value, kLongestSleep);
    }
    sleeping.store(0);
    if (word.load() == value) {
      if (peer_has_ended() && word.load() == value) {  // looked at again: it may have been the last
        throw PeerLost("the process at the other end of a channel has ended");
      }
      if (std::chrono::steady_clock::now() - start > timeout_) {
        throw PeerTimeout(
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
