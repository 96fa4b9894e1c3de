// The forward of a stage that is a Python function.
#pragma once

#include "engine/run/run.h"

#include <torch/csrc/utils/pybind.h>

namespace pd2 {

// Defines Message, ForwardCall and ForwardResult: the function's argument and result.
void bind_forward(py::module_& module);

// The Python function as a Forward, which any thread may call.
Forward forward_in_python(py::function function);

}  // namespace pd2
