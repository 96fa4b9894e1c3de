// What the system knows of the calling thread; does nothing where the system is not Linux.
#pragma once

#include <string>

#ifdef __linux__
#include <pthread.h>
#include <sys/resource.h>
#endif

namespace pd2 {

// For debuggers and profilers; up to 15 characters.
inline void name_this_thread([[maybe_unused]] const std::string& name) {
#ifdef __linux__
  pthread_setname_np(pthread_self(), name.c_str());
#endif
}

// Other threads come first where cores are short.
inline void lower_priority_of_this_thread() {
#ifdef __linux__
  setpriority(PRIO_PROCESS, 0, 10);  // of this thread alone, unlike what POSIX says
#endif
}

}  // namespace pd2
