// Schedules, their simulation and the partition, as Python sees them.
#include "bindings/bindings.h"
#include "core/check.h"
#include "core/partition/stage_split.h"
#include "core/schedule/generate.h"
#include "core/schedule/global_updates.h"
#include "core/schedule/unroll.h"
#include "core/schedule/validate.h"
#include "core/simulate/simulate.h"

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace pd2 {
namespace {

// Costs as tuples of the structs' fields in their order.
py::tuple simulate_for_python(const Schedule& schedule,
                              const std::vector<std::array<double, 11>>& stages,
                              const std::vector<std::array<double, 3>>& edges, int num_batches) {
  Costs costs;
  for (const auto& [f, i, w, recompute, all_reduce, update, activations, inputs, weights, gradients,
                    state] : stages) {
    costs.stages.push_back(
        {f, i, w, recompute, all_reduce, update, activations, inputs, weights, gradients, state});
  }
  for (const auto& [latency, bandwidth, bytes] : edges) {
    costs.edges.push_back({latency, bandwidth, bytes});
  }
  Simulation result;
  {
    const py::gil_scoped_release no_gil;
    result = simulate(schedule, costs, num_batches);
  }
  py::list rows;
  for (const std::vector<SimulatedAction>& actions : result.timeline) {
    for (const SimulatedAction& action : actions) {
      rows.append(py::make_tuple(action.stage, std::string(1, static_cast<char>(action.kind)),
                                 action.batch,
                                 schedule.number_in_batch(action.stage, action.microbatch),
                                 action.version, action.start, action.end));
    }
  }
  return py::make_tuple(rows, result.makespan, result.period, result.bubbles, result.most_in_flight,
                        result.peak_bytes);
}

using SplitForPython = std::pair<std::vector<int>, double>;

// Defines a function of a StageSplitProblem, which comes as tuples.
template <typename Call>
void bind_split(py::module_& module, const char* name, const char* documentation, Call call) {
  module.def(
      name,
      [call](const std::vector<std::array<double, 6>>& layers,
             const std::vector<std::tuple<int, int, std::int64_t>>& edges,
             const std::vector<std::array<double, 6>>& stages, const std::vector<bool>& can_cut,
             const std::vector<std::tuple<int, std::vector<int>, double, double>>& values,
             double seconds_per_byte, double seconds_per_value, bool recompute) {
        StageSplitProblem problem;
        for (const auto& [forward, input, weight, activations, parameters, trained] : layers) {
          problem.layers.push_back({forward, input, weight, activations, parameters, trained});
        }
        for (const auto& [producer, consumer, bytes] : edges) {
          problem.edges.push_back({producer, consumer, bytes});
        }
        for (const auto& [trained, frozen, activations, inputs, limit, slowness] : stages) {
          problem.stages.push_back({trained, frozen, activations, inputs, limit, slowness});
        }
        for (const auto& [producer, consumers, bytes, seconds] : values) {
          problem.values.push_back({producer, consumers, bytes, seconds});
        }
        problem.can_cut = can_cut;
        problem.seconds_per_byte = seconds_per_byte;
        problem.seconds_per_value = seconds_per_value;
        problem.recompute = recompute;
        const py::gil_scoped_release no_gil;
        return call(problem);
      },
      py::arg("layers"), py::arg("edges"), py::arg("stages"), py::kw_only(),
      py::arg("can_cut") = std::vector<bool>(),
      py::arg("values") = std::vector<std::tuple<int, std::vector<int>, double, double>>(),
      py::arg("seconds_per_byte") = 0.0, py::arg("seconds_per_value") = 0.0,
      py::arg("recompute") = false, documentation);
}

}  // namespace

void bind_core(py::module_& module) {
  py::class_<Schedule>(module, "Schedule")
      .def_readonly("name", &Schedule::name)
      .def_readonly("num_pipelines", &Schedule::num_pipelines)
      .def_readonly("num_stages", &Schedule::num_stages)
      .def_readonly("num_microbatches", &Schedule::num_microbatches)
      .def_readonly("delay", &Schedule::delay)
      .def_readonly("placement", &Schedule::placement)
      .def_readonly("num_versions", &Schedule::num_versions)
      .def_property_readonly("depth", &Schedule::depth)
      .def_property_readonly("total_microbatches", &Schedule::total_microbatches)
      .def("validate", [](const Schedule& self) { validate(self); })
      .def("check_global_updates", [](const Schedule& self) { check_global_updates(self); })
      .def(
          "check_joint_updates",
          [](const Schedule& self, const std::vector<JointUpdate>& joint, const std::string& why) {
            check_joint_updates(self, joint, why);
          },
          py::arg("joint"), py::arg("why"))
      .def("max_in_flight",
           [](const Schedule& self, int stage) { return max_in_flight(self, stage); })
      .def("update_order", [](const Schedule& self, int rank) { return update_order(self, rank); })
      .def_property_readonly("most_batches_behind",
                             [](const Schedule& self) { return most_batches_behind(self); })
      .def("to_csv", [](const Schedule& self) { return to_csv(self); })
      .def(
          "__eq__", [](const Schedule& self, const Schedule& other) { return self == other; },
          py::is_operator())
      .def("__hash__", [](const Schedule& self) { return std::hash<std::string>()(to_text(self)); })
      .def_property_readonly("has_late_forwards",
                             [](const Schedule& self) { return has_late_forwards(self); })
      .def("__str__", [](const Schedule& self) { return to_text(self); });
  module.def("make_schedule", &make_schedule, py::arg("name"), py::arg("num_stages"),
             py::arg("num_microbatches"), py::arg("stages_per_rank") = 1);
  module.def("schedule_from_text", &from_text);
  module.def("schedule_names", &schedule_names);
  // The fields of LayerCost, Edge, StageMemoryRule and Value as tuples, in their order.
  bind_split(module, "split_stages",
             R"(Cuts layers into stages such that the slowest is as fast as possible.

Exact, within the memory of each stage; csrc/core/partition/stage_split.h states rule, ties and method.

Args:
    layers: one (forward, input_grad, weight_grad, activation_bytes, parameter_bytes,
        trained_bytes) per layer in execution order, seconds and bytes of one microbatch.
    edges: (producer, consumer, bytes); edges of one producer carry the same value.
    stages: one (trained, frozen, activations, inputs, limit, slowness) per stage: what its bytes of
        each kind are multiplied by, its memory in bytes, and what its compute is multiplied by.
    can_cut: layers - 1: may a stage end after layer i; empty: everywhere.
    values: (producer, consumers, bytes, seconds) of further values, seconds as paid by a stage that
        one leaves or enters.
    seconds_per_byte, seconds_per_value: of the messages of edges, in each direction.
    recompute: every stage runs its forward once more.

Returns:
    (first layer of each stage, seconds per microbatch of the slowest), or None: nothing fits.

Raises:
    ValueError: sizes that do not fit, too few allowed cuts, or an amount that is negative or not
        finite.
)",
             [](const StageSplitProblem& problem) -> std::optional<SplitForPython> {
               const std::optional<StageSplit> split = split_stages(problem);
               if (!split) return std::nullopt;
               return SplitForPython(split->first_layers, split->slowest);
             });
  bind_split(module, "smallest_memory_limit",
             R"(The smallest limit, in bytes, with which split_stages() finds something.

The limit is the same for all stages; those in ``stages`` are not looked at. Arguments and errors as
split_stages().
)",
             [](const StageSplitProblem& problem) { return smallest_memory_limit(problem); });
  module.def("simulate", &simulate_for_python, py::arg("schedule"), py::arg("stages"),
             py::arg("edges"), py::arg("num_batches"));
}

}  // namespace pd2
