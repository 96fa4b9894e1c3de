// Errors of the core, and failures of a running pipeline, as the classes of pipedream2bw/errors.py.
#include "engine/fault.h"

#include "bindings/bindings.h"
#include "core/schedule/errors.h"
#include "engine/discards.h"
#include "planner/plan/plan.h"
#include "transport/peer_error.h"

#include <torch/csrc/Exceptions.h>

#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace pd2 {
namespace {

py::module_ errors() { return py::module_::import("pipedream2bw.errors"); }

// As StageError of its type, with the traceback chained.
py::object error_of(const Failure& failure) {
  const py::object error = errors().attr(failure.type.c_str())(
      failure.text, py::arg("rank") = failure.rank, py::arg("stage") = failure.stage,
      py::arg("replica") = failure.replica, py::arg("batch") = failure.batch,
      py::arg("microbatch") = failure.microbatch, py::arg("action") = failure.action,
      py::arg("cause") = failure.cause);
  if (!failure.traceback.empty()) {
    error.attr("__cause__") = errors().attr("RemoteTraceback")(failure.traceback);
  }
  return error;
}

Failure failure_from(const py::object& error) {
  Failure failure;
  failure.type = errors().attr("type_of")(error).cast<std::string>();
  failure.text = py::str(error).cast<std::string>();
  failure.traceback = errors().attr("traceback_of")(error).cast<std::string>();
  failure.rank = error.attr("rank").cast<std::optional<int>>();
  failure.stage = error.attr("stage").cast<std::optional<int>>();
  failure.replica = error.attr("replica").cast<std::optional<int>>();
  failure.batch = error.attr("batch").cast<std::optional<std::int64_t>>();
  failure.microbatch = error.attr("microbatch").cast<std::optional<int>>();
  failure.action = error.attr("action").cast<std::optional<std::string>>();
  failure.cause = error.attr("cause").cast<std::optional<std::string>>().value_or(failure.text);
  return failure;
}

void describe_python(const py::error_already_set& error, Failure& failure,
                     const std::function<int(const py::object&)>& keep) {
  const py::object value = error.value();
  if (error.trace()) {  // which an exception out of C++ does not know itself
    PyException_SetTraceback(value.ptr(), error.trace().ptr());
  }
  const py::module_ traceback = py::module_::import("traceback");
  const auto text_of = [](const py::object& lines) {
    return py::str("").attr("join")(lines).cast<std::string>();
  };
  const py::object cause = traceback.attr("format_exception_only")(value);
  failure.cause = py::str(text_of(cause)).attr("strip")().cast<std::string>();
  failure.traceback = text_of(traceback.attr("format_exception")(value));
  if (py::isinstance(value, errors().attr("StageError"))) {
    failure.type = errors().attr("type_of")(value).cast<std::string>();
  }
  failure.kept = keep(value);
}

void set_error(const Failure& failure) {
  const py::object error = error_of(failure);
  PyErr_SetObject(py::type::of(error).ptr(), error.ptr());
}

// Raises NAME(text, **attributes).
void raise(const char* name, const std::exception& error, const py::dict& attributes) {
  const py::object type = errors().attr(name);
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

// What is thrown here and is none of these is translated as pybind11 does.
void translate(std::exception_ptr raised) {
  try {
    if (raised) {
      std::rethrow_exception(raised);
    }
  } catch (const Deadlock& error) {
    raise("Deadlock", error, attributes_of(error));
  } catch (const ScheduleError& error) {
    raise("ScheduleError", error, attributes_of(error));
  } catch (const DoesNotFit& error) {
    raise("DoesNotFit", error, py::dict(py::arg("limit") = error.limit()));
  } catch (const PipelineError& error) {
    set_error(error.failure());
  } catch (const PeerError&) {
    Failure failure = failure_of(raised, 0);
    failure.text = failure.cause;
    set_error(failure);
  }
}

}  // namespace

Failure describe_exception(const std::exception_ptr& error, int here,
                           const std::function<int(const py::object&)>& keep) {
  const py::gil_scoped_acquire gil;
  Failure failure;
  failure.rank = here;
  try {
    std::rethrow_exception(error);
  } catch (py::error_already_set& python) {
    describe_python(python, failure, keep);
  } catch (python_error& python) {  // a Python autograd function's, out of the autograd engine
    python.restore();
    describe_python(py::error_already_set(), failure, keep);
  } catch (...) {
    return failure_of(error, here);
  }
  return failure;
}

namespace {

void bind_discards(py::module_& module) {
  py::class_<Discards, std::shared_ptr<Discards>>(module, "Discards")
      .def(py::init<std::shared_ptr<SharedBoard>>(), py::arg("shared").none(true))
      .def(
          "discard",
          [](Discards& self, std::int64_t batch, const py::object& error) {
            self.discard(batch, failure_from(error));
          },
          py::arg("batch"), py::arg("error"))
      .def_property_readonly("first",
                             [](const Discards& self) {
                               const std::int64_t first = self.first();
                               return first == Discards::kNone ? std::nullopt
                                                               : std::optional(first);
                             })
      .def_property_readonly("failure",
                             [](const Discards& self) -> py::object {
                               const auto found = self.failure();
                               return found ? py::make_tuple(found->first, error_of(found->second),
                                                             found->second.kept)
                                            : py::object(py::none());
                             })
      .def("go_on", &Discards::go_on);
}

}  // namespace

void bind_fault(py::module_& module) {
  bind_discards(module);
  py::class_<Fault, std::shared_ptr<Fault>>(module, "Fault")
      .def(py::init<int>(), py::kw_only(), py::arg("rank") = 0)
      .def(
          "raise_",
          [](Fault& self, const py::object& error) {
            Failure failure = failure_from(error);
            const py::gil_scoped_release no_gil;
            self.raise(std::move(failure));
          },
          py::arg("error"))
      .def_property_readonly("rank", &Fault::rank)
      .def_property_readonly("raised", &Fault::raised)
      .def_property_readonly("error",
                             [](const Fault& self) -> py::object {
                               const auto failure = self.failure();
                               return failure ? error_of(*failure) : py::none();
                             })
      .def_property_readonly("kept", [](const Fault& self) {
        const auto failure = self.failure();
        return failure ? failure->kept : -1;
      });
  py::register_local_exception_translator(&translate);
}

}  // namespace pd2
