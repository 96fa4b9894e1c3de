// What knows Python: this folder, and nothing else.
#pragma once

#include "engine/by_device_type.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <utility>

namespace pd2 {

struct Failure;
struct ForwardCall;
struct ForwardResult;
struct GivenInputs;

void bind_schedule(py::module_& module);
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

// Python's lock where C++ threads are: waiting without it, and dropping what needs it.

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

// C++ structs as Python classes whose fields have names.

// A class with these fields as attributes. It is made from keywords; a field that is left out has
// the struct's default.
template <typename Struct, typename... Types>
void bind_struct(py::module_& module, const char* name,
                 const std::pair<const char*, Types Struct::*>&... fields) {
  const Struct defaults;
  py::class_<Struct> bound(module, name);
  const auto make = [members = std::tuple(fields.second...)](Types... values) {
    Struct made;
    std::apply([&](auto... member) { ((made.*member = std::move(values)), ...); }, members);
    return made;
  };
  bound.def(py::init(make), py::kw_only(), (py::arg(fields.first) = defaults.*fields.second)...);
  (bound.def_readonly(fields.first, fields.second), ...);
}

// Binds a function by which another extension, built from the same headers, sets what there is
// by_device_type() for a device of its own.
template <typename What>
void bind_registration(py::module_& module, const char* name) {
  module.def(
      name,
      [](int device_type, const py::capsule& what) {
        by_device_type<What>().set(static_cast<c10::DeviceType>(device_type),
                                   *what.get_pointer<const What>());
      },
      py::arg("device_type"), py::arg("what"));
}

// bind_struct() with the fields of a table, and further ones.
template <typename Struct, typename Type, std::size_t N, typename... Fields>
void bind_struct(py::module_& module, const char* name,
                 const std::array<std::pair<const char*, Type Struct::*>, N>& table,
                 const Fields&... fields) {
  const auto bind = [&](const auto&... of_table) {
    bind_struct(module, name, fields..., of_table...);
  };
  std::apply(bind, table);
}

}  // namespace pd2
