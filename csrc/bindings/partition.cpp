// The partition of layers into stages, as Python sees it.
#include "bindings/bindings.h"
#include "planner/partition/stage_split.h"

#include <utility>
#include <vector>

namespace pd2 {
namespace {

// Splits by seconds alone: no stage has a limit of memory.
std::vector<int> split(std::vector<LayerCost> layers, int num_stages, std::vector<bool> can_cut,
                       std::vector<Value> values) {
  const py::gil_scoped_release no_gil;
  return split_stages({.layers = std::move(layers),
                       .edges = {},
                       .values = std::move(values),
                       .can_cut = std::move(can_cut),
                       .stages = std::vector<StageMemoryRule>(num_stages)})
      .value()
      .first_layers;
}

}  // namespace

void bind_partition(py::module_& module) {
  bind_struct(module, "LayerCost", kLayerCosts);
  bind_struct(module, "Edge", std::pair("producer", &Edge::producer),
              std::pair("consumer", &Edge::consumer), std::pair("bytes", &Edge::bytes));
  bind_struct(module, "Value", kValueCosts, std::pair("producer", &Value::producer),
              std::pair("consumers", &Value::consumers));
  module.def("split_stages", &split, py::arg("layers"), py::arg("num_stages"), py::arg("can_cut"),
             py::arg("values"));
}

}  // namespace pd2
