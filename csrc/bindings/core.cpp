// Schedules, their simulation and the partition, as Python sees them.
#include "bindings/bindings.h"
#include "core/check.h"
#include "core/generate.h"
#include "core/global_updates.h"
#include "core/partition.h"
#include "core/simulate.h"
#include "core/unroll.h"
#include "core/validate.h"

#include <array>
#include <functional>
#include <string>
#include <vector>

namespace pd2 {
namespace {

Sends parse_sends(const std::string& name) {
  for (const Sends sends : {Sends::kAsynchronous, Sends::kBlocking, Sends::kRendezvous}) {
    if (name == to_string(sends)) return sends;
  }
  detail::throw_value_error("sends: " + name + ", known: asynchronous, blocking, rendezvous");
}

// Costs as tuples of the structs' fields in their order.
py::tuple simulate_for_python(const Schedule& schedule,
                              const std::vector<std::array<double, 11>>& stages,
                              const std::vector<std::array<double, 3>>& edges,
                              const std::string& sends, int num_batches) {
  Costs costs;
  for (const auto& [f, i, w, recompute, all_reduce, update, activations, inputs, weights, gradients,
                    state] : stages) {
    costs.stages.push_back(
        {f, i, w, recompute, all_reduce, update, activations, inputs, weights, gradients, state});
  }
  for (const auto& [latency, bandwidth, bytes] : edges) {
    costs.edges.push_back({latency, bandwidth, bytes});
  }
  costs.sends = parse_sends(sends);
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
  module.def(
      "partition",
      [](const std::vector<double>& costs, const std::vector<double>& cut_costs, int num_stages,
         const std::vector<bool>& can_cut) {
        const py::gil_scoped_release no_gil;
        return partition(costs, cut_costs, num_stages, can_cut);
      },
      py::arg("costs"), py::arg("cut_costs"), py::arg("num_stages"), py::arg("can_cut"));
  module.def("simulate", &simulate_for_python, py::arg("schedule"), py::arg("stages"),
             py::arg("edges"), py::arg("sends"), py::arg("num_batches"));
}

}  // namespace pd2
