// Waiting that Ctrl-C ends.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <chrono>

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

}  // namespace pd2
