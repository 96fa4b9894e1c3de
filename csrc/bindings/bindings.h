// What knows Python: this folder, and nothing else.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace pd2 {

void bind_errors();
void bind_schedule(py::module_& module);
void bind_partition(py::module_& module);
void bind_plan(py::module_& module);
void bind_optimizer(py::module_& module);
void bind_stage(py::module_& module);
void bind_transport(py::module_& module);
void bind_channels(py::module_& module);
void bind_random(py::module_& module);
void bind_fault(py::module_& module);
void bind_losses(py::module_& module);
void bind_clipping(py::module_& module);
void bind_executor(py::module_& module);

}  // namespace pd2
