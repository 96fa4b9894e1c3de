#include "checked_device/memory_sharing.h"

#include "checked_device/runtime.h"
#include "checked_device/streams.h"
#include "checked_device/without_gil.h"
#include "transport/shared_memory.h"

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <pthread.h>
#include <string>
#include <thread>
#include <utility>

namespace pd2 {
namespace {

constexpr int kPoison = 0xff;

std::atomic<double> delay_seconds = 0.001;

// Makes what a stream is given, one after the other. Never ends: what it waits for may never come.
class StreamThread {
 public:
  explicit StreamThread(StreamNumber stream) : stream_(stream) {
    std::thread([this] { run(); }).detach();
  }

  static StreamThread& of(StreamNumber stream) {
    static std::mutex mutex;
    static auto* const all = new std::map<StreamNumber, StreamThread*>;
    const std::lock_guard lock(mutex);
    StreamThread*& found = (*all)[stream];
    if (found == nullptr) found = new StreamThread(stream);
    return *found;
  }

  void post(const std::string& name, std::span<const Use> uses, std::function<void()> work) {
    const WithoutGil nobody_waits_for_python;
    const std::lock_guard one_after_the_other(posting_);
    const LaunchPtr launch = Runtime::instance().begin_transfer(stream_, name, uses);
    {
      const std::lock_guard lock(mutex_);
      tasks_.emplace_back(launch, std::move(work));
    }
    changed_.notify_all();
  }

 private:
  void run() {
    pthread_setname_np(pthread_self(), "checked_shared");
    while (true) {
      std::pair<LaunchPtr, std::function<void()>> task;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return !tasks_.empty(); });
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      Runtime::instance().await_turn(task.first);
      task.second();
      Runtime::instance().finish(task.first);
    }
  }

  const StreamNumber stream_;
  std::mutex posting_;  // tasks are queued in the order of the stream
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::pair<LaunchPtr, std::function<void()>>> tasks_;
};

// The device's, of whose uses by this process's streams the runtime knows.
std::shared_ptr<std::byte> on_device(std::unique_ptr<SharedMemory> memory, std::size_t bytes) {
  std::byte* const data = memory->data();
  Runtime::instance().add_memory(reinterpret_cast<Address>(data), bytes);
  return {data, [kept = std::shared_ptr<SharedMemory>(std::move(memory))](std::byte* freed) {
            Runtime::instance().remove_memory(reinterpret_cast<Address>(freed));
          }};
}

std::shared_ptr<std::byte> allocate(c10::Device, std::size_t bytes, std::string& address) {
  std::unique_ptr<SharedMemory> memory = SharedMemory::create(bytes);
  if (!memory) return nullptr;
  std::memset(memory->data(), kPoison, bytes);
  address = std::to_string(bytes) + " " + memory->address();
  return on_device(std::move(memory), bytes);
}

std::shared_ptr<std::byte> open(c10::Device, const std::string& address) {
  std::size_t bytes = 0;
  int read = 0;
  if (std::sscanf(address.c_str(), "%zu %n", &bytes, &read) != 1) return nullptr;
  std::unique_ptr<SharedMemory> memory = SharedMemory::open(address.substr(read));
  return memory ? on_device(std::move(memory), bytes) : nullptr;
}

std::shared_ptr<void> pin(c10::Device, std::byte* pages, std::size_t) {
  return {pages, [](void*) {}};
}

void copy(std::byte* to, const std::byte* from, std::size_t bytes, const MaybeStream& stream) {
  const Use uses[] = {{reinterpret_cast<Address>(from), bytes, false},
                      {reinterpret_cast<Address>(to), bytes, true}};
  StreamThread::of(number_of(*stream)).post("shared copy", uses, [=] {
    std::this_thread::sleep_for(std::chrono::duration<double>(delay_seconds.load()));
    std::memcpy(to, from, bytes);
  });
}

void set(SharedWord& word, std::uint32_t value, const MaybeStream& stream) {
  StreamThread::of(number_of(*stream)).post("shared word", {}, [&word, value] { word = value; });
}

void await(SharedWord& word, std::uint32_t value, const MaybeStream& stream) {
  if (Runtime::instance().leave_out(Ordering::peer_wait)) return;
  StreamThread::of(number_of(*stream)).post("wait for a shared word", {}, [&word, value] {
    while (static_cast<std::int32_t>(word.load() - value) < 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  });
}

}  // namespace

const DeviceMemorySharing& checked_memory_sharing() {
  static const DeviceMemorySharing sharing{
      [](c10::Device device) { return MaybeStream(stream_from_pool(index_of(device), true)); },
      [](const MaybeStream&) {},
      allocate,
      open,
      pin,
      copy,
      set,
      await};
  return sharing;
}

void set_sharing_delay(std::chrono::duration<double> delay) { delay_seconds = delay.count(); }

}  // namespace pd2
