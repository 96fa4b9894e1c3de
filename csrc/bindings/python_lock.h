// Python's lock where C++ threads are: waiting without it, and dropping what needs it.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <memory>
#include <utility>

namespace pd2 {

// Repeats a bounded wait until it succeeds, so that Ctrl-C ends it.
template <typename WaitFor>
void wait_interruptibly(WaitFor wait_for) {
  while (true) {
    {
      const py::gil_scoped_release no_gil;
      if (wait_for(std::chrono::milliseconds(100))) {
        return;
      }
    }
    if (PyErr_CheckSignals() != 0) {
      throw py::error_already_set();
    }
  }
}

// A deleter for objects whose destructor ends a thread: that thread may be waiting for Python's
// lock, which the owner of the last reference may hold.
template <typename T>
void delete_without_gil(T* object) {
  const py::gil_scoped_acquire gil;  // the caller may have it or not
  const py::gil_scoped_release no_gil;
  delete object;
}

// A Python object to which C++ threads may drop the last reference.
template <typename T>
std::shared_ptr<T> shared_python(T object) {
  return std::shared_ptr<T>(new T(std::move(object)), [](T* held) {
    const py::gil_scoped_acquire gil;
    delete held;
  });
}

}  // namespace pd2
