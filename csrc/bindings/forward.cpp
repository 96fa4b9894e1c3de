// The forward of a stage that is a Python function, and its random numbers.
#include "bindings/bindings.h"
#include "engine/run/keyed_random.h"
#include "engine/run/run.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace pd2 {
namespace {

// Named tuples, which are made and read in a fraction of the time of classes of pybind11: every
// microbatch makes some. The types live as long as the process.
py::handle message_type, call_type;

// type(*fields), but without calling the function in Python that this is.
py::object make(py::handle type, const py::tuple& fields) {
  PyObject* made = PyTuple_Type.tp_new(reinterpret_cast<PyTypeObject*>(type.ptr()),
                                       py::make_tuple(fields).ptr(), nullptr);
  if (made == nullptr) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(made);
}

py::object named_tuple(py::module_& module, const char* name, const py::tuple& fields,
                       const py::tuple& defaults) {
  py::object type = py::module_::import("collections")
                        .attr("namedtuple")(name, fields, py::arg("defaults") = defaults,
                                            py::arg("module") = module.attr("__name__"));
  module.attr(name) = type;
  return type;
}

py::list to_python(std::vector<Message>& messages) {
  py::list list;
  for (Message& message : messages) {
    list.append(make(message_type,
                     py::make_tuple(py::bytes(message.structure), std::move(message.tensors))));
  }
  return list;
}

// In the order of bind_forward().
py::object to_python(const ForwardCall& call, const py::list& inbound) {
  return make(call_type, py::make_tuple(call.run, call.microbatch, call.slot, inbound, call.again,
                                        call.loss_scale, call.given));
}

// Structure and tensors, in the order of bind_forward().
Message message_of(const py::tuple& fields) {
  Message message;
  message.structure = fields[0].cast<std::string>();
  message.tensors = fields[1].cast<std::vector<at::Tensor>>();
  return message;
}

// Outbound, loss, bytes_kept and metrics, in the order of bind_forward().
ForwardResult result_of(const py::tuple& fields) {
  ForwardResult result;
  for (const py::handle message : fields[0]) {
    result.outbound.push_back(message_of(py::cast<py::tuple>(message)));
  }
  if (!fields[1].is_none()) {
    result.loss = fields[1].cast<at::Tensor>();
  }
  result.bytes_kept = fields[2].cast<std::int64_t>();
  if (!fields[3].is_none()) {
    result.metrics = fields[3].cast<at::Tensor>();
  }
  return result;
}

// The fields of a RandomPlace.
using PlaceFields = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t>;

RandomPlace place_of(const PlaceFields& fields) {
  const auto [key, number, left, num_more] = fields;
  return {key, number, left, num_more};
}

void bind_random(py::module_& module) {
  module.def("draw_seed", &draw_seed);
  module.def("mix_seed", &mix_seed, py::arg("seed"), py::arg("value"));
  module.def("number_draws", &number_draws, py::arg("number"), py::arg("count"));
  module.attr("ALL_DRAWS") = RandomPlace::kAll;
  module.def("is_keyed", &is_keyed);
  module.def("random_place", [] {
    const std::optional<RandomPlace> place = random_place();
    return place ? std::optional<PlaceFields>(
                       {place->key, place->number, place->left, place->num_more})
                 : std::nullopt;
  });
  module.def(
      "set_random_place",
      [](const std::optional<PlaceFields>& place) {
        set_random_place(place ? std::optional(place_of(*place)) : std::nullopt);
      },
      py::arg("place").none(true));
  struct Entered {
    RandomPlace place;
    KeyedRandom::Options options;
    std::optional<KeyedRandom> random;
  };
  py::class_<Entered>(module, "KeyedRandom")
      .def(py::init([](const PlaceFields& place, bool repeats, bool counts_fakes) {
             auto made = std::make_unique<Entered>();
             made->place = place_of(place);
             made->options = {repeats, counts_fakes};
             return made;
           }),
           py::arg("place"), py::kw_only(), py::arg("repeats") = false,
           py::arg("counts_fakes") = false)
      .def("__enter__", [](Entered& self) { self.random.emplace(self.place, self.options); })
      .def("__exit__", [](Entered& self, const py::args&) { self.random.reset(); });
}

}  // namespace

void bind_forward(py::module_& module) {
  bind_random(module);
  message_type =
      named_tuple(module, "Message", py::make_tuple("structure", "tensors"), py::tuple()).release();
  call_type = named_tuple(module, "ForwardCall",
                          py::make_tuple("run", "microbatch", "slot", "inbound", "again",
                                         "loss_scale", "given"),
                          py::tuple())
                  .release();
  named_tuple(module, "GivenInputs", py::make_tuple("tensors", "kind", "refusal"), py::tuple());
  named_tuple(module, "ForwardResult", py::make_tuple("outbound", "loss", "bytes_kept", "metrics"),
              py::make_tuple(py::tuple(), py::none(), 0, py::none()));
}

std::function<GivenInputs(const ForwardCall&)> look_in_python(py::function function) {
  return [held = shared_python(std::move(function))](const ForwardCall& call) {
    const py::gil_scoped_acquire gil;
    const py::tuple found = (*held)(to_python(call, py::list()));
    return GivenInputs{found[0].cast<std::vector<at::Tensor>>(), found[1].cast<std::int64_t>(),
                       found[2].cast<std::string>()};
  };
}

Forward forward_in_python(py::function function) {
  return [held = shared_python(std::move(function))](ForwardCall call) {
    const py::gil_scoped_acquire gil;
    const py::tuple result = (*held)(to_python(call, to_python(call.inbound)));
    // While Python's lock is held, which freeing tensors may need.
    call.inbound.clear();
    call.given.reset();
    return result_of(result);
  };
}

}  // namespace pd2
