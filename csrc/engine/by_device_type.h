// What each kind of device does in a way of its own, found by device type.
#pragma once

#include <c10/core/Device.h>

#include <map>
#include <mutex>

namespace pd2 {

// Thread-safe. What is found stays where it is; to replace it while it is used is not allowed.
template <typename T>
class ByDeviceType {
 public:
  void set(c10::DeviceType type, const T& what) {
    const std::lock_guard lock(mutex_);
    by_type_[type] = what;
  }
  // Null if there is none.
  const T* find(c10::DeviceType type) const {
    const std::lock_guard lock(mutex_);
    const auto found = by_type_.find(type);
    return found == by_type_.end() ? nullptr : &found->second;
  }

 private:
  mutable std::mutex mutex_;
  std::map<c10::DeviceType, T> by_type_;
};

// Those of one type T, which lasts as long as the process.
template <typename T>
ByDeviceType<T>& by_device_type() {
  static auto* const one = new ByDeviceType<T>;
  return *one;
}

}  // namespace pd2
