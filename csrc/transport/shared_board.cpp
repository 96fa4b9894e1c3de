#include "transport/shared_board.h"

#include <algorithm>
#include <array>
#include <new>
#include <numeric>
#include <stdexcept>
#include <utility>

namespace pd2 {
namespace {

constexpr int kHasLeft = -1;

}  // namespace

struct SharedBoard::Shared {
  int num_ranks;
  int row_size;
  alignas(64) std::atomic<std::uint32_t> arrived;  // ranks, in the exchange under way
  std::atomic<std::uint32_t> exchanged;            // exchanges that all have begun, modulo 2^32
  alignas(64) std::atomic<std::uint64_t> word;
};

// What one rank writes.
struct SharedBoard::Member {
  alignas(64) std::atomic<int> process;  // its number, or kHasLeft
  std::atomic<std::uint32_t> sent;       // numbers, modulo 2^32
  std::array<double, kRoom> numbers;
};

// Shared, the Members, the rows of an even and of an odd exchange, and for each pair of ranks how
// many numbers the one has received from the other.
std::size_t SharedBoard::bytes(int num_ranks, int row_size) {
  const std::size_t ranks = num_ranks, row = row_size;
  return sizeof(Shared) + ranks * sizeof(Member) + 2 * ranks * row * sizeof(std::int64_t) +
         ranks * ranks * sizeof(std::atomic<std::uint32_t>);
}

std::atomic<std::uint64_t>& SharedBoard::word() { return shared_->word; }

SharedBoard::Member& SharedBoard::member(int rank) {
  return reinterpret_cast<Member*>(shared_ + 1)[rank];
}

std::span<std::int64_t> SharedBoard::rows_of(std::uint32_t exchange) {
  const std::size_t numbers = std::size_t(shared_->num_ranks) * shared_->row_size;
  auto* const rows = reinterpret_cast<std::int64_t*>(&member(shared_->num_ranks));
  return {rows + exchange % 2 * numbers, numbers};
}

std::atomic<std::uint32_t>& SharedBoard::received(int from, int to) {
  auto* const counts =
      reinterpret_cast<std::atomic<std::uint32_t>*>(rows_of(1).data() + rows_of(1).size());
  return counts[std::size_t(from) * shared_->num_ranks + to];
}

std::unique_ptr<SharedBoard> SharedBoard::create(int num_ranks, int row_size, Timeout timeout) {
  std::unique_ptr<SharedMemory> memory = SharedMemory::create(bytes(num_ranks, row_size));
  if (!memory) {
    return nullptr;
  }
  // Everything else begins as the zeros that are there.
  auto* const shared = new (memory->data()) Shared{};
  shared->num_ranks = num_ranks;
  shared->row_size = row_size;
  return std::unique_ptr<SharedBoard>(new SharedBoard(std::move(memory), 0, timeout));
}

std::unique_ptr<SharedBoard> SharedBoard::open(const std::string& address, int rank,
                                               Timeout timeout) {
  std::unique_ptr<SharedMemory> memory = SharedMemory::open(address);
  if (!memory) {
    return nullptr;
  }
  return std::unique_ptr<SharedBoard>(new SharedBoard(std::move(memory), rank, timeout));
}

SharedBoard::SharedBoard(std::unique_ptr<SharedMemory> memory, int rank, Timeout timeout)
    : memory_(std::move(memory)),
      shared_(reinterpret_cast<Shared*>(memory_->data())),
      rank_(rank),
      timeout_(timeout),
      all_ranks_(shared_->num_ranks),
      watched_(shared_->num_ranks) {
  std::iota(all_ranks_.begin(), all_ranks_.end(), 0);
  member(rank).process.store(number_of_this_process());
}

SharedBoard::~SharedBoard() { leave(); }

// No rank begins exchange n + 2 before all have begun n + 1 and so have read n, whose place it
// takes.
void SharedBoard::begin_exchange(std::span<const std::int64_t> row) {
  if (static_cast<int>(row.size()) != shared_->row_size) {
    throw std::invalid_argument("a row must have " + std::to_string(shared_->row_size) +
                                " numbers, got " + std::to_string(row.size()));
  }
  std::ranges::copy(row, rows_of(exchange_).begin() + std::ptrdiff_t(rank_) * shared_->row_size);
  if (shared_->arrived.fetch_add(1) + 1 == static_cast<std::uint32_t>(shared_->num_ranks)) {
    shared_->arrived.store(0);
    shared_->exchanged.store(exchange_ + 1);
    wake(shared_->exchanged);
  }
}

std::optional<std::vector<std::int64_t>> SharedBoard::finish_exchange(Timeout timeout) {
  if (!wait_while(shared_->exchanged, exchange_, all_ranks_, timeout)) {
    if (left_) {
      throw std::runtime_error("this process has left the pipeline");
    }
    return std::nullopt;
  }
  const std::span<std::int64_t> rows = rows_of(exchange_++);
  return std::vector<std::int64_t>(rows.begin(), rows.end());
}

void SharedBoard::send(double value, std::span<const int> ranks) {
  Member& mine = member(rank_);
  const std::uint32_t number = mine.sent.load(std::memory_order_relaxed);
  for (const int& rank : ranks) {
    if (!wait_while(received(rank_, rank), number - kRoom, {&rank, 1}, timeout_)) {
      if (left_) {
        return;
      }
      throw PeerTimeout("timeout: rank " + std::to_string(rank) + " received nothing for " +
                            std::to_string(timeout_.count()) + " seconds",
                        rank);
    }
  }
  mine.numbers[number % kRoom] = value;
  mine.sent.store(number + 1);
  wake(mine.sent);
}

std::optional<double> SharedBoard::receive(int rank) {
  Member& sender = member(rank);
  std::atomic<std::uint32_t>& count = received(rank, rank_);
  const std::uint32_t number = count.load(std::memory_order_relaxed);
  if (!wait_while(sender.sent, number, {&rank, 1}, timeout_)) {
    if (left_) {
      return std::nullopt;
    }
    throw PeerTimeout("timeout: nothing came for " + std::to_string(timeout_.count()) + " seconds",
                      rank);
  }
  const double value = sender.numbers[number % kRoom];
  count.store(number + 1);
  wake(count);
  return value;
}

void SharedBoard::leave() {
  left_ = true;
  int own = number_of_this_process();  // in a forked child this board is still its parent's
  member(rank_).process.compare_exchange_strong(own, kHasLeft);
  wake(shared_->exchanged);
  for (const int rank : all_ranks_) {
    wake(member(rank).sent);
  }
  // Who waits for room, which is rare, looks up by itself.
}

bool SharedBoard::wait_while(const std::atomic<std::uint32_t>& word, std::uint32_t value,
                             std::span<const int> awaited, Timeout timeout) {
  using Clock = std::chrono::steady_clock;
  if (word.load() != value) {
    return true;
  }
  const Clock::time_point start = Clock::now();
  while (!left_) {
    const Timeout rest = timeout - (Clock::now() - start);
    if (rest.count() <= 0) {
      return false;
    }
    sleep_while(
        word, value,
        std::chrono::ceil<std::chrono::nanoseconds>(std::min<Timeout>(rest, kLongestSleep)));
    if (word.load() != value) {
      return true;
    }
    if (const std::optional<PeerLost> missing = find_missing(awaited)) {
      // Looked at again: what a rank did last counts.
      if (word.load() != value) {
        return true;
      }
      throw *missing;
    }
  }
  return false;
}

std::optional<PeerLost> SharedBoard::find_missing(std::span<const int> ranks) {
  const std::lock_guard lock(watched_mutex_);
  for (const int rank : ranks) {
    const int process = member(rank).process.load();
    if (process == kHasLeft) {
      return PeerLost("rank " + std::to_string(rank) + " has left the pipeline", rank);
    }
    if (!watched_[rank]) {
      watched_[rank] = std::make_unique<WatchedProcess>(process);
    }
    if (watched_[rank]->has_ended()) {
      return PeerLost("the process of rank " + std::to_string(rank) + " has ended", rank);
    }
  }
  return std::nullopt;
}

}  // namespace pd2
