#include "checked_device/allocator.h"

#include "checked_device/runtime.h"
#include "checked_device/streams.h"

#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

namespace pd2 {

struct DeviceBlock {
  void* data;
  std::size_t bytes;  // rounded up
  StreamNumber stream;
  int device;
  std::set<StreamNumber> recorded;  // other streams
  bool left_out = false;            // a record_stream, by a test
  Clock until;                      // comes back when this is over
  GraphMemory* graphs = nullptr;    // whose it is

  Address address() const { return reinterpret_cast<Address>(data); }
};

struct GraphMemory {
  std::vector<DeviceBlock*> all;
  std::vector<DeviceBlock*> free;
  std::vector<DeviceBlock*> given;  // in the present recording
  std::size_t bytes_before = 0;

  std::size_t bytes() const {
    std::size_t sum = 0;
    for (const DeviceBlock* block : all) sum += block->bytes;
    return sum;
  }
};

namespace {

constexpr std::size_t kAlignment = 512;
constexpr int kPoison = 0xff;  // NaN in all floating-point types, -1 in integers

void* new_memory(std::size_t bytes) {
  void* data = std::aligned_alloc(kAlignment, bytes);
  TORCH_CHECK(data != nullptr, "checked: no memory for ", bytes, " bytes");
  return data;
}

std::size_t rounded(std::size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(std::size_t num_bytes) override;
  c10::DeleterFnPtr raw_deleter() const override { return &DeviceMemory::free_block; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override;
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override;
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    const std::lock_guard lock(mutex_);
    peak_.at(device) = allocated_.at(device);
  }

  void keep(DeviceBlock& block, StreamNumber stream) {
    const std::lock_guard lock(mutex_);
    if (stream != block.stream) block.recorded.insert(stream);
  }
  int device_of(const void* pointer) const;
  void settle() {
    const std::lock_guard lock(mutex_);
    for (auto& [stream, pool] : pools_) {
      std::ranges::for_each(std::exchange(pool.waiting, {}),
                            [&, &to = pool](DeviceBlock* block) { come_back(to, block); });
      settle(pool, stream);
    }
  }
  void begin_graph(StreamNumber stream, const std::shared_ptr<GraphMemory>& memory) {
    const std::lock_guard lock(mutex_);
    memory->given.clear();
    memory->bytes_before = memory->bytes();
    graphs_[stream] = memory;
  }
  std::int64_t end_graph(StreamNumber stream);
  void drop(GraphMemory* memory);
  static DeviceBlock* block_of(const c10::DataPtr& memory) {
    return memory.get_deleter() == &free_block ? static_cast<DeviceBlock*>(memory.get_context())
                                               : nullptr;
  }

 private:
  struct Pool {
    std::vector<DeviceBlock*> waiting;    // recorded on streams that are not through
    std::vector<DeviceBlock*> unsettled;  // freed since the last allocation
    std::multimap<std::size_t, DeviceBlock*> free;
  };

  static void free_block(void* block);
  void free(DeviceBlock* block);
  static void come_back(Pool& pool, DeviceBlock* block);
  void settle(Pool& pool, StreamNumber stream);
  DeviceBlock* take(Pool& pool, std::size_t bytes, StreamNumber stream, int device);
  DeviceBlock* take_for_graph(GraphMemory& memory, std::size_t bytes, StreamNumber stream,
                              int device);

  mutable std::mutex mutex_;
  std::map<StreamNumber, Pool> pools_;
  std::map<StreamNumber, std::shared_ptr<GraphMemory>> graphs_;  // that are recorded
  std::map<Address, DeviceBlock*> blocks_;                       // all
  std::vector<std::size_t> allocated_ = std::vector<std::size_t>(Runtime::kDevices, 0);
  std::vector<std::size_t> peak_ = std::vector<std::size_t>(Runtime::kDevices, 0);
};

DeviceMemory& device_memory() {
  static auto* const memory = new DeviceMemory;  // outlives the interpreter's last tensors
  return *memory;
}

c10::DataPtr DeviceMemory::allocate(std::size_t num_bytes) {
  const int device = current_device();
  const StreamNumber stream = current_stream_number(device);
  const std::size_t bytes = std::max(rounded(num_bytes), kAlignment);
  Runtime::instance().allocate(device);
  DeviceBlock* block = nullptr;
  {
    const std::lock_guard lock(mutex_);
    const auto graphs = graphs_.find(stream);
    block = graphs == graphs_.end() ? take(pools_[stream], bytes, stream, device)
                                    : take_for_graph(*graphs->second, bytes, stream, device);
    allocated_[device] += bytes;
    peak_[device] = std::max(peak_[device], allocated_[device]);
  }
  std::memset(block->data, kPoison, bytes);
  Runtime::instance().give_memory(block->address(), bytes, stream);
  return {block->data, block, &free_block, checked_device(device)};
}

DeviceBlock* DeviceMemory::take(Pool& pool, std::size_t bytes, StreamNumber stream, int device) {
  settle(pool, stream);
  const auto last = pool.free.upper_bound(bytes);  // the last one that was freed
  if (last != pool.free.begin() && std::prev(last)->first == bytes) {
    DeviceBlock* const block = std::prev(last)->second;
    pool.free.erase(std::prev(last));
    return block;
  }
  auto* const block = new DeviceBlock{new_memory(bytes), bytes, stream, device, {}, false, {}};
  blocks_.emplace(block->address(), block);
  Runtime::instance().add_memory(block->address(), bytes);
  return block;
}

DeviceBlock* DeviceMemory::take_for_graph(GraphMemory& memory, std::size_t bytes,
                                          StreamNumber stream, int device) {
  const auto found = std::ranges::find_if(
      memory.free, [&](const DeviceBlock* block) { return block->bytes == bytes; });
  DeviceBlock* block = nullptr;
  if (found != memory.free.end()) {
    block = *found;
    memory.free.erase(found);
  } else {
    Pool none;  // what is free may be used again by other work, which runs before each replay
    block = take(none, bytes, stream, device);
    block->graphs = &memory;
    memory.all.push_back(block);
  }
  memory.given.push_back(block);
  return block;
}

std::int64_t DeviceMemory::end_graph(StreamNumber stream) {
  const std::lock_guard lock(mutex_);
  const auto memory = std::move(graphs_.at(stream));
  graphs_.erase(stream);
  for (const DeviceBlock* block : memory->given) std::memset(block->data, kPoison, block->bytes);
  return static_cast<std::int64_t>(memory->bytes() - memory->bytes_before);
}

void DeviceMemory::drop(GraphMemory* memory) {
  {
    const std::lock_guard lock(mutex_);
    for (DeviceBlock* block : memory->all) block->graphs = nullptr;
    for (DeviceBlock* block : memory->free) pools_[block->stream].unsettled.push_back(block);
  }
  delete memory;
}

// The streams that it was recorded on are through.
void DeviceMemory::come_back(Pool& pool, DeviceBlock* block) {
  Runtime::instance().forget(block->address(), block->until);
  pool.unsettled.push_back(block);
}

void DeviceMemory::settle(Pool& pool, StreamNumber stream) {
  auto& runtime = Runtime::instance();
  std::erase_if(pool.waiting, [&](DeviceBlock* block) {
    if (!runtime.is_over(block->until)) return false;
    come_back(pool, block);
    return true;
  });
  while (!pool.unsettled.empty()) {
    DeviceBlock* const block = pool.unsettled.back();
    pool.unsettled.pop_back();
    std::memset(block->data, kPoison, block->bytes);
    pool.free.emplace(block->bytes, block);
    // Whether a dropped record_stream was needed shows here, where the memory may be used again.
    const bool left_out = std::exchange(block->left_out, false);
    runtime.reuse_memory(block->address(), block->bytes, stream, left_out);
  }
}

void DeviceMemory::free_block(void* block) {
  device_memory().free(static_cast<DeviceBlock*>(block));
}

void DeviceMemory::free(DeviceBlock* block) {
  auto& runtime = Runtime::instance();
  const std::lock_guard lock(mutex_);
  allocated_[block->device] -= block->bytes;
  if (block->graphs != nullptr) {
    block->graphs->free.push_back(block);
    return;
  }
  auto& pool = pools_[block->stream];
  if (block->recorded.empty()) {
    std::memset(block->data, kPoison, block->bytes);
    pool.unsettled.push_back(block);
    return;
  }
  block->until = Clock();
  for (const StreamNumber stream : std::exchange(block->recorded, {})) {
    block->until.join(runtime.clock_of(stream));
  }
  pool.waiting.push_back(block);
}

void DeviceMemory::recordStream(const c10::DataPtr& memory, c10::Stream stream) {
  DeviceBlock* const block = block_of(memory);
  if (block == nullptr) return;  // of somebody else
  auto& runtime = Runtime::instance();
  const bool left_out = runtime.leave_out(Ordering::record_stream);
  const StreamNumber number = number_of(stream);
  if (left_out) {
    const std::lock_guard lock(mutex_);
    block->left_out = true;
    // Unknown until the memory is used again, unless it is recorded on its own stream.
    runtime.leave_out_record(number == block->stream || block->recorded.contains(number));
    return;
  }
  keep(*block, number);
}

c10::CachingDeviceAllocator::DeviceStats DeviceMemory::getDeviceStats(c10::DeviceIndex device) {
  const std::lock_guard lock(mutex_);
  c10::CachingDeviceAllocator::DeviceStats stats;
  auto& bytes = stats.allocated_bytes[0];  // the aggregate
  bytes.current = static_cast<std::int64_t>(allocated_.at(device));
  bytes.peak = static_cast<std::int64_t>(peak_.at(device));
  return stats;
}

int DeviceMemory::device_of(const void* pointer) const {
  const auto address = reinterpret_cast<Address>(pointer);
  const std::lock_guard lock(mutex_);
  auto block = blocks_.upper_bound(address);
  if (block == blocks_.begin()) return -1;
  --block;
  return address < block->first + block->second->bytes ? block->second->device : -1;
}

// Host memory that streams copy from and to.
class PinnedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t num_bytes) override {
    const std::size_t bytes = std::max(rounded(num_bytes), kAlignment);
    void* const data = new_memory(bytes);
    const auto address = reinterpret_cast<Address>(data);
    {
      const std::lock_guard lock(mutex_);
      ends_[address] = address + bytes;
    }
    Runtime::instance().add_memory(address, bytes);
    return {data, data, &PinnedMemory::free, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &PinnedMemory::free; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }

  bool holds(const void* pointer) const {
    const auto address = reinterpret_cast<Address>(pointer);
    const std::lock_guard lock(mutex_);
    auto block = ends_.upper_bound(address);
    return block != ends_.begin() && address < (--block)->second;
  }

  static PinnedMemory& instance() {
    static auto* const memory = new PinnedMemory;
    return *memory;
  }

 private:
  // A stream's copies from and to it have been made: operators run at once.
  static void free(void* data) {
    const auto address = reinterpret_cast<Address>(data);
    auto& self = instance();
    {
      const std::lock_guard lock(self.mutex_);
      self.ends_.erase(address);
    }
    Runtime::instance().remove_memory(address);
    std::free(data);
  }

  mutable std::mutex mutex_;
  std::map<Address, Address> ends_;
};

}  // namespace

void register_allocator() { c10::SetAllocator(c10::DeviceType::PrivateUse1, &device_memory()); }

c10::Allocator* pinned_allocator() { return &PinnedMemory::instance(); }

bool is_pinned(const void* pointer) { return PinnedMemory::instance().holds(pointer); }

void settle_memory() { device_memory().settle(); }

int device_of_memory(const void* pointer) { return device_memory().device_of(pointer); }

std::shared_ptr<GraphMemory> new_graph_memory() {
  return {new GraphMemory, [](GraphMemory* memory) { device_memory().drop(memory); }};
}

void begin_graph_memory(std::size_t stream, const std::shared_ptr<GraphMemory>& memory) {
  device_memory().begin_graph(stream, memory);
}

std::int64_t end_graph_memory(std::size_t stream) noexcept {
  return device_memory().end_graph(stream);
}

void keep_for_stream(const c10::DataPtr& memory, std::size_t stream) {
  if (auto* const block = DeviceMemory::block_of(memory)) device_memory().keep(*block, stream);
}

}  // namespace pd2
