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
             py::arg("values"),
             R"(Cuts layers into stages such that the slowest is as fast as possible.

Exact; csrc/planner/partition/stage_split.h states rule, ties and method.

Args:
    layers: one per layer in execution order, seconds of one microbatch.
    num_stages: how many stages there are to be.
    can_cut: layers - 1: may a stage end after layer i; true num_stages - 1 times or more.
    values: between layers, with seconds as paid by a stage that one leaves or enters.

Returns:
    The first layer of each stage.
)");
}

}  // namespace pd2
