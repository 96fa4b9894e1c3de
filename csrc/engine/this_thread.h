// What the system knows of the calling thread; does nothing where the system is not Linux.
#pragma once

#include <string>

#ifdef __linux__
#include <pthread.h>
#endif

namespace pd2 {

// For debuggers and profilers; up to 15 characters.
inline void name_this_thread([[maybe_unused]] const std::string& name) {
#ifdef __linux__
  pthread_setname_np(pthread_self(), name.c_str());
#endif
}

}  // namespace pd2
