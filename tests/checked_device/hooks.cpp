// What torch asks of a device: its guard (devices, streams, events) and its hooks.
#include "checked_device/hooks.h"

#include "checked_device/allocator.h"
#include "checked_device/generator.h"
#include "checked_device/graph.h"
#include "checked_device/runtime.h"
#include "checked_device/streams.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <optional>

namespace pd2 {
namespace {

std::atomic<double> clock_rate = 1;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return checked_device(exchange_device(device.index()));
  }
  c10::Device getDevice() const override { return checked_device(current_device()); }
  void setDevice(c10::Device device) const override { exchange_device(index_of(device)); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() < Runtime::kDevices) exchange_device(device.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override { return Runtime::kDevices; }

  c10::Stream getStream(c10::Device device) const override {
    return current_stream(index_of(device));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(static_cast<StreamNumber>(index_of(device)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high_priority) const override {
    return stream_from_pool(index_of(device), high_priority);
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return stream_from_pool(index_of(device), priority < 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return exchange_stream(stream); }
  bool queryStream(const c10::Stream& stream) const override {
    auto& runtime = Runtime::instance();
    return runtime.query(runtime.clock_of(number_of(stream)));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Runtime::instance().synchronize_stream(number_of(stream));
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    Runtime::instance().synchronize_device(device < 0 ? current_device() : device);
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex device,
              c10::EventFlag) const override {
    TORCH_CHECK(device == -1 || device == stream.device_index(), "Event device index ",
                static_cast<int>(device), " does not match recording stream's device index ",
                static_cast<int>(stream.device_index()), ".");
    const std::uint64_t graph = GraphRecording::of_event(number_of(stream));
    if (*event == nullptr) *event = new Moment;
    *static_cast<Moment*>(*event) = {Runtime::instance().clock_of(number_of(stream)),
                                     std::chrono::steady_clock::now(), graph};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    const Moment& moment = *static_cast<Moment*>(event);
    GraphRecording::refuse_wait(moment.graph, number_of(stream));
    Runtime::instance().wait(number_of(stream), moment.clock);
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || Runtime::instance().query(for_host(event).clock);
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) Runtime::instance().synchronize(for_host(event).clock);
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Moment*>(event);
  }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    TORCH_CHECK(first != nullptr && second != nullptr,
                "Both events must be recorded before calculating elapsed time.");
    const Moment& begin = for_host(first);
    const Moment& end = for_host(second);
    auto& runtime = Runtime::instance();
    TORCH_CHECK(runtime.is_over(begin.clock) && runtime.is_over(end.clock),
                "Both events must be completed before calculating elapsed time.");
    return std::chrono::duration<double, std::milli>(end.recorded - begin.recorded).count() *
           clock_rate;
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    c10::getDeviceAllocator(c10::DeviceType::PrivateUse1)->recordStream(memory, stream);
  }

 private:
  static const Moment& for_host(void* event) {
    const Moment& moment = *static_cast<Moment*>(event);
    GraphRecording::refuse_wait(moment.graph, std::nullopt);
    return moment;
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return Runtime::kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchange_device(device); }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device());
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return static_cast<c10::DeviceIndex>(exchange_device(device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  c10::Device getDeviceFromPtr(void* data) const override {
    const int device = device_of_memory(data);
    TORCH_CHECK(device >= 0, "the memory is on no checked device");
    return checked_device(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t bytes) const override {
    const c10::DeviceGuard guard(storage.device());
    auto* const self = storage.unsafeGetStorageImpl();
    auto data = self->allocator()->allocate(bytes);
    const int device = index_of(storage.device());
    const std::size_t kept = std::min(bytes, self->nbytes());
    const Use uses[] = {{reinterpret_cast<Address>(storage.data()), kept, false},
                        {reinterpret_cast<Address>(data.get()), kept, true}};
    Runtime::instance().launch(current_stream_number(device), "resize", uses);
    std::memcpy(data.get(), storage.data(), kept);
    self->set_data_ptr_noswap(std::move(data));
    self->set_nbytes(bytes);
  }
};

}  // namespace

void set_clock_rate(double rate) { clock_rate = rate; }

void register_hooks() {
  static const Guard guard;
  const c10::impl::DeviceGuardImplRegistrar registered(c10::DeviceType::PrivateUse1, &guard);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
}

}  // namespace pd2
