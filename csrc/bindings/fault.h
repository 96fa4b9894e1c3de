// Failures of a running pipeline as the exceptions of pipedream2bw/errors.py.
#pragma once

#include "engine/fault.h"

#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <functional>

namespace pd2 {

// Gets a Python exception, gives the number under which it is kept; negative: it is not.
using KeepError = std::function<int(const py::object&)>;

// failure_of() for exceptions that may be Python's.
Failure describe_exception(const std::exception_ptr& error, int here, const KeepError& keep);

}  // namespace pd2
