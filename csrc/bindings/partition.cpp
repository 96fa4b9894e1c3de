// The partition of layers into stages, as Python sees it.
#include "bindings/structs.h"
#include "core/partition/stage_split.h"

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace pd2 {
namespace {

// Defines a function of a StageSplitProblem's fields.
template <typename Call>
void bind_split(py::module_& module, const char* name, const char* documentation, Call call) {
  module.def(
      name,
      [call](std::vector<LayerCost> layers, std::vector<Edge> edges,
             std::vector<StageMemoryRule> stages, std::vector<bool> can_cut,
             std::vector<Value> values, double seconds_per_byte, double seconds_per_value,
             bool recompute) {
        const StageSplitProblem problem = {.layers = std::move(layers),
                                           .edges = std::move(edges),
                                           .values = std::move(values),
                                           .can_cut = std::move(can_cut),
                                           .stages = std::move(stages),
                                           .seconds_per_byte = seconds_per_byte,
                                           .seconds_per_value = seconds_per_value,
                                           .recompute = recompute};
        const py::gil_scoped_release no_gil;
        return call(problem);
      },
      py::arg("layers"), py::arg("edges"), py::arg("stages"), py::kw_only(),
      py::arg("can_cut") = std::vector<bool>(), py::arg("values") = std::vector<Value>(),
      py::arg("seconds_per_byte") = 0.0, py::arg("seconds_per_value") = 0.0,
      py::arg("recompute") = false, documentation);
}

void bind_split_structs(py::module_& module) {
  bind_struct(module, "LayerCost", std::pair("forward", &LayerCost::forward),
              std::pair("input_grad", &LayerCost::input_grad),
              std::pair("weight_grad", &LayerCost::weight_grad),
              std::pair("activation_bytes", &LayerCost::activation_bytes),
              std::pair("parameter_bytes", &LayerCost::parameter_bytes),
              std::pair("trained_bytes", &LayerCost::trained_bytes));
  bind_struct(module, "Edge", std::pair("producer", &Edge::producer),
              std::pair("consumer", &Edge::consumer), std::pair("bytes", &Edge::bytes));
  bind_struct(module, "Value", std::pair("producer", &Value::producer),
              std::pair("consumers", &Value::consumers), std::pair("bytes", &Value::bytes),
              std::pair("seconds", &Value::seconds), std::pair("kept_bytes", &Value::kept_bytes),
              std::pair("trained_bytes", &Value::trained_bytes),
              std::pair("frozen_bytes", &Value::frozen_bytes));
  bind_struct(module, "StageMemoryRule", std::pair("trained", &StageMemoryRule::trained),
              std::pair("frozen", &StageMemoryRule::frozen),
              std::pair("activations", &StageMemoryRule::activations),
              std::pair("inputs", &StageMemoryRule::inputs),
              std::pair("limit", &StageMemoryRule::limit),
              std::pair("slowness", &StageMemoryRule::slowness));
  py::class_<StageSplit>(module, "StageSplit")
      .def_readonly("first_layers", &StageSplit::first_layers)
      .def_readonly("slowest", &StageSplit::slowest);
}

}  // namespace

void bind_partition(py::module_& module) {
  bind_split_structs(module);
  bind_split(module, "split_stages",
             R"(Cuts layers into stages such that the slowest is as fast as possible.

Exact, within the memory of each stage; csrc/core/partition/stage_split.h states rule, ties and method.

Args:
    layers: one per layer in execution order, seconds and bytes of one microbatch.
    edges: messages between layers; edges of one producer carry the same value.
    stages: one per stage: what its bytes of each kind are multiplied by, its memory in bytes, and
        what its compute is multiplied by.
    can_cut: layers - 1: may a stage end after layer i; empty: everywhere.
    values: further values, with seconds as paid by a stage that one leaves or enters.
    seconds_per_byte, seconds_per_value: of the messages of edges, in each direction.
    recompute: every stage runs its forward once more.

Returns:
    The split, or None: nothing fits.

Raises:
    ValueError: sizes that do not fit, too few allowed cuts, or an amount that is negative or not
        finite.
)",
             [](const StageSplitProblem& problem) { return split_stages(problem); });
  bind_split(module, "smallest_memory_limit",
             R"(The smallest limit, in bytes, with which split_stages() finds something.

The limit is the same for all stages; those in ``stages`` are not looked at. Arguments and errors as
split_stages().
)",
             [](const StageSplitProblem& problem) { return smallest_memory_limit(problem); });
}

}  // namespace pd2
