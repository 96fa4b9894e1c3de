// What the system knows of the calling thread.
#pragma once

#include <pthread.h>
#include <string>
#include <sys/resource.h>

namespace pd2 {

// For debuggers and profilers; up to 15 characters.
inline void name_this_thread(const std::string& name) {
  pthread_setname_np(pthread_self(), name.c_str());
}

// Other threads come first where cores are short.
inline void lower_priority_of_this_thread() {
  setpriority(PRIO_PROCESS, 0, 10);  // of this thread alone, unlike what POSIX says
}

}  // namespace pd2
