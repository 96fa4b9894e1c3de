#pragma once

#include <array>
#include <pthread.h>
#include <string>
#include <unistd.h>

namespace pd2 {

inline std::string this_thread_name() {
  std::array<char, 32> name{};
  pthread_getname_np(pthread_self(), name.data(), name.size());
  return name.data();
}

// "thread 123 (its name)", as a debugger shows it.
inline std::string this_thread_text() {
  return "thread " + std::to_string(gettid()) + " (" + this_thread_name() + ")";
}

}  // namespace pd2
