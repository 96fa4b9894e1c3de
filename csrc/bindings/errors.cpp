// The core's errors as the classes of pipedream2bw/errors.py, with their data as attributes.
#include "core/schedule/errors.h"

#include "bindings/bindings.h"
#include "planner/plan/plan.h"

#include <exception>

namespace pd2 {
namespace {

// Raises pipedream2bw.errors.NAME(text, **attributes).
void raise(const char* name, const std::exception& error, const py::dict& attributes) {
  const py::object type = py::module_::import("pipedream2bw.errors").attr(name);
  PyErr_SetObject(type.ptr(), type(error.what(), **attributes).ptr());
}

py::dict attributes_of(const ScheduleError& error) {
  py::object cell = py::none();
  if (error.place()) {
    const ScheduleError::Place& place = *error.place();
    cell = py::make_tuple(place.rank, to_string(place.list), place.position);
  }
  return py::dict(py::arg("rule") = to_string(error.rule()), py::arg("cell") = cell);
}

void translate(std::exception_ptr raised) {
  try {
    if (raised) std::rethrow_exception(raised);
  } catch (const Deadlock& error) {
    raise("Deadlock", error, attributes_of(error));
  } catch (const ScheduleError& error) {
    raise("ScheduleError", error, attributes_of(error));
  } catch (const DoesNotFit& error) {
    raise("DoesNotFit", error, py::dict(py::arg("limit") = error.limit()));
  }
}

}  // namespace

// What is thrown here and is none of these is translated as pybind11 does.
void bind_errors() { py::register_local_exception_translator(&translate); }

}  // namespace pd2
