// Schedules and their simulation, as Python sees them.
#include "bindings/bindings.h"
#include "core/schedule/generate.h"
#include "core/schedule/global_updates.h"
#include "core/schedule/late_forwards.h"
#include "core/schedule/methods.h"
#include "core/schedule/unroll.h"
#include "core/schedule/v_shape.h"
#include "core/schedule/validate.h"
#include "planner/simulate/simulate.h"

#include <pybind11/operators.h>
#include <pybind11/typing.h>

#include <algorithm>
#include <array>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace pd2 {
namespace {

void bind_late_forwards(py::class_<Schedule>& schedule) {
  schedule
      .def(
          "with_late_forwards",
          [](Schedule self, std::vector<int> late) {
            self.late_forwards = std::move(late);
            validate(self);
            return self;
          },
          py::arg("late"))
      .def(
          "late_for_slots",
          [](const Schedule& self, int slots, std::vector<JointUpdate> joint, double backward) {
            return late_forwards(self, update_of_slots(self, slots, std::move(joint), backward));
          },
          py::arg("slots"), py::arg("joint"), py::arg("backward") = 2)
      .def(
          "late_for_seconds",
          [](const Schedule& self, std::vector<double> seconds, double forward, double backward) {
            return late_forwards(self, {std::move(seconds), {}, forward, backward});
          },
          py::arg("seconds"), py::arg("forward"), py::arg("backward"));
}

void bind_schedule_class(py::module_& module) {
  py::class_<Schedule> schedule(module, "Schedule");
  schedule.def_readonly("name", &Schedule::name)
      .def_readonly("num_pipelines", &Schedule::num_pipelines)
      .def_readonly("num_stages", &Schedule::num_stages)
      .def_readonly("num_microbatches", &Schedule::num_microbatches)
      .def_readonly("delay", &Schedule::delay)
      .def_property_readonly("late_forwards", &Schedule::late_forwards_of_each)
      .def_property_readonly("late_share", &Schedule::late_share)
      .def_property_readonly("has_fresh_forwards", &Schedule::has_fresh_forwards)
      .def_readonly("placement", &Schedule::placement)
      .def_readonly("num_versions", &Schedule::num_versions)
      .def_property_readonly("depth", &Schedule::depth)
      .def_property_readonly("total_microbatches", &Schedule::total_microbatches)
      .def("number_in_batch", &Schedule::number_in_batch, py::arg("stage"), py::arg("microbatch"))
      .def("validate", &validate)
      .def("check_global_updates", &check_global_updates)
      .def("check_joint_updates", &check_joint_updates, py::arg("joint"), py::arg("why"))
      .def("max_in_flight", &max_in_flight, py::arg("stage"))
      .def("update_order", &update_order, py::arg("rank"))
      .def_property_readonly("has_one_delay", &Schedule::has_one_delay)
      .def_property_readonly("splits_backward", &Schedule::splits_backward)
      .def_property_readonly("most_batches_behind", &most_batches_behind)
      .def("to_csv", &to_csv)
      .def(py::self == py::self)
      .def("__hash__", [](const Schedule& self) { return std::hash<std::string>()(to_text(self)); })
      .def_property_readonly("forward_batches_behind", &forward_batches_behind)
      .def("__str__", &to_text);
  bind_late_forwards(schedule);
}

void bind_methods(py::module_& module) {
  py::class_<ScheduleMethod>(module, "ScheduleMethod")
      .def_readonly("name", &ScheduleMethod::name)
      .def_readonly("has_chunks", &ScheduleMethod::has_chunks)
      .def_property_readonly("is_v", &ScheduleMethod::is_v)
      .def_property_readonly("is_bidirectional", &ScheduleMethod::is_bidirectional)
      .def_readonly("is_fresh", &ScheduleMethod::is_fresh)
      .def_readonly("is_planned", &ScheduleMethod::is_planned)
      .def_property_readonly("size_rules", &size_rules);
  module.def("schedule_methods", [] {
    const std::span<const ScheduleMethod> methods = schedule_methods();
    return std::vector<ScheduleMethod>(methods.begin(), methods.end());
  });
}

// V's with two weight versions, by their four steps.
void bind_v(py::module_& module) {
  using Steps = std::array<int, 4>;
  const auto as_steps = [](const Steps& s) { return VSteps{s[0], s[1], s[2], s[3]}; };
  // Half microbatches in flight on the fullest rank, and the fewest microbatches of a batch. None
  // where two actions of a rank would have one slot.
  module.def(
      "v_needs",
      [as_steps](int ranks, const Steps& steps) -> std::optional<std::pair<int, int>> {
        const auto periods = v_periods(ranks, as_steps(steps));
        if (!periods) return std::nullopt;
        int halves = 0;
        for (const Period& each : *periods) halves = std::max(halves, most_halves_in_flight(each));
        return std::pair(halves, least_microbatches(ranks, as_steps(steps)));
      },
      py::arg("ranks"), py::arg("steps"));
  module.def(
      "v_schedule",
      [as_steps](const std::string& name, int ranks, const Steps& steps, int num_microbatches) {
        const std::vector<Period> periods = v_periods(ranks, as_steps(steps)).value();
        return make_v_schedule(name, periods, num_microbatches, false);
      },
      py::arg("name"), py::arg("ranks"), py::arg("steps"), py::arg("num_microbatches"));
}

void bind_simulation(py::module_& module) {
  bind_struct(module, "StageCosts", kStageCosts);
  bind_struct(module, "EdgeCosts", std::pair("latency", &EdgeCosts::latency),
              std::pair("bandwidth", &EdgeCosts::bandwidth),
              std::pair("message_bytes", &EdgeCosts::message_bytes));
  bind_struct(module, "HostCosts", std::pair("down", &HostCosts::down),
              std::pair("up", &HostCosts::up), std::pair("buckets", &HostCosts::buckets),
              std::pair("one_buffer", &HostCosts::one_buffer));
  py::class_<SimulatedAction>(module, "SimulatedAction")
      .def_readonly("stage", &SimulatedAction::stage)
      .def_property_readonly(
          "kind",
          [](const SimulatedAction& self) { return std::string(1, static_cast<char>(self.kind)); })
      .def_readonly("batch", &SimulatedAction::batch)
      .def_readonly("microbatch", &SimulatedAction::microbatch)
      .def_readonly("version", &SimulatedAction::version)
      .def_readonly("start", &SimulatedAction::start)
      .def_readonly("end", &SimulatedAction::end);
  py::class_<Simulation>(module, "Simulation")
      .def_readonly("timeline", &Simulation::timeline)
      .def_readonly("makespan", &Simulation::makespan)
      .def_readonly("period", &Simulation::period)
      .def_readonly("bubbles", &Simulation::bubbles)
      .def_readonly("most_in_flight", &Simulation::most_in_flight)
      .def_readonly("peak_bytes", &Simulation::peak_bytes);
  module.def(
      "simulate",
      [](const Schedule& schedule, std::vector<StageCosts> stages, std::vector<EdgeCosts> edges,
         int num_batches, const std::optional<HostCosts>& host) {
        const Costs costs = {
            .stages = std::move(stages), .edges = std::move(edges), .skips = {}, .host = host};
        const py::gil_scoped_release no_gil;
        return simulate(schedule, costs, num_batches);
      },
      py::arg("schedule"), py::arg("stages"), py::arg("edges"), py::arg("num_batches"),
      py::arg("host"));
}

}  // namespace

void bind_schedule(py::module_& module) {
  bind_schedule_class(module);
  bind_methods(module);
  module.def("make_schedule", &make_schedule, py::arg("name"), py::arg("num_stages"),
             py::arg("num_microbatches"), py::arg("stages_per_rank") = 1);
  module.def("schedule_from_text", &from_text, py::arg("text"));
  module.def("schedule_names", [] { return schedule_names(); });
  module.def("action_kinds", [] {
    py::typing::Dict<py::str, py::str> names;
    for (const ActionKind kind : kActionKinds) {
      names[py::str(std::string(1, static_cast<char>(kind)))] = std::string(name_of(kind));
    }
    return names;
  });
  bind_v(module);
  bind_simulation(module);
}

}  // namespace pd2
