// What a recording of a device's work keeps from others.
#pragma once

#include <mutex>

namespace pd2 {

// One recording at a time in a process: what torch's allocator and the device's libraries keep for
// it is shared. Meanwhile that allocator can give no memory back, and says so by an error: whoever
// asks it to has this lock.
inline std::mutex& recording_mutex() {
  static std::mutex one;
  return one;
}

}  // namespace pd2
