// Random numbers of forwards that are called again, as Python sees them.
#include "bindings/bindings.h"
#include "engine/run/private_generator.h"

#include <cstdint>
#include <memory>
#include <optional>

namespace pd2 {

void bind_random(py::module_& module) {
  module.def("draw_seed", &draw_seed);
  module.def("next_seed", &next_seed);
  struct Entered {
    std::optional<std::uint64_t> seed;
    std::optional<PrivateGenerator> generator;
  };
  py::class_<Entered>(module, "PrivateGenerator")
      .def(py::init([](std::optional<std::uint64_t> seed) {
             auto made = std::make_unique<Entered>();
             made->seed = seed;
             return made;
           }),
           py::arg("seed"))
      .def("__enter__", [](Entered& self) { self.generator.emplace(self.seed); })
      .def("__exit__", [](Entered& self, const py::args&) { self.generator.reset(); });
}

}  // namespace pd2
