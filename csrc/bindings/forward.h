// The forward of a stage that is a Python function, and the errors that it raises.
#pragma once

#include "engine/run/run.h"

#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <string>

namespace pd2 {

// Defines Message, ForwardCall and ForwardResult: the function's argument and result.
void bind_forward(py::module_& module);

// The Python function as a Forward, which any thread may call.
Forward forward_in_python(py::function function);

// The text of an exception, with the Python traceback if it has one.
std::string describe_exception(const std::exception_ptr& error);

}  // namespace pd2
