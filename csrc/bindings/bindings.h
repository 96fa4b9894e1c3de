// What knows Python: this folder, and nothing else.
#pragma once

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <functional>
#include <string>

namespace pd2 {

struct Failure;
struct ForwardCall;
struct ForwardResult;
struct GivenInputs;

void bind_errors();
void bind_schedule(py::module_& module);
void bind_partition(py::module_& module);
void bind_plan(py::module_& module);
void bind_shared_memory(py::module_& module);
void bind_fault(py::module_& module);
void bind_stage(py::module_& module);
void bind_channels(py::module_& module);
void bind_losses(py::module_& module);
void bind_forward(py::module_& module);
void bind_clipping(py::module_& module);
void bind_hooks(py::module_& module);
void bind_executor(py::module_& module);

// The process group that Python knows by this name; null for an empty name.
inline c10::intrusive_ptr<c10d::ProcessGroup> resolve_group(const std::string& name) {
  return name.empty() ? nullptr : c10d::resolve_process_group(name);
}

// The forward of a stage that is a Python function, from ForwardCall to ForwardResult of
// bind_forward(). Any thread may call it.
std::function<ForwardResult(ForwardCall)> forward_in_python(py::function function);

// GraphSetup's `look` likewise, to GivenInputs.
std::function<GivenInputs(const ForwardCall&)> look_in_python(py::function function);

// failure_of() for exceptions that may be Python's. `keep` gets such a one and gives the number
// under which it is kept; negative: it is not.
Failure describe_exception(const std::exception_ptr& error, int here,
                           const std::function<int(const py::object&)>& keep);

}  // namespace pd2
