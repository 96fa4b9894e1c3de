// C++ structs as Python classes whose fields have names.
#pragma once

#include "bindings/bindings.h"

#include <array>
#include <tuple>
#include <utility>

namespace pd2 {

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

// Binds a function by which another extension, built from the same headers, gives what it does for
// a type of device of its own.
template <typename What>
void bind_registration(py::module_& module, const char* name,
                       void (*set)(c10::DeviceType type, const What& what)) {
  module.def(
      name,
      [set](int device_type, const py::capsule& what) {
        set(static_cast<c10::DeviceType>(device_type), *what.get_pointer<const What>());
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
