// The planner, as Python sees it.
#include "planner/plan/plan.h"

#include "bindings/bindings.h"
#include "planner/partition/stage_split.h"

#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

namespace pybind11::detail {

// An enumeration of three values with names: a str in Python.
template <typename Enum>
struct named_caster {
  PYBIND11_TYPE_CASTER(Enum, const_name("str"));

  bool load(handle source, bool) {
    for (const Enum each : {Enum(0), Enum(1), Enum(2)}) {
      if (!isinstance<str>(source) || source.cast<std::string>() != pd2::to_string(each)) continue;
      value = each;
      return true;
    }
    return false;
  }
  static handle cast(Enum source, return_value_policy, handle) {
    return str(pd2::to_string(source)).release();
  }
};

template <>
struct type_caster<pd2::Recompute> : named_caster<pd2::Recompute> {};
template <>
struct type_caster<pd2::Objective> : named_caster<pd2::Objective> {};

}  // namespace pybind11::detail

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

void bind_split(py::module_& module) {
  bind_struct(module, "LayerCost", kLayerCosts);
  bind_struct(module, "Edge", std::pair("producer", &Edge::producer),
              std::pair("consumer", &Edge::consumer), std::pair("bytes", &Edge::bytes));
  bind_struct(module, "Value", kValueCosts, std::pair("producer", &Value::producer),
              std::pair("consumers", &Value::consumers));
  module.def("split_stages", &split, py::arg("layers"), py::arg("num_stages"), py::arg("can_cut"),
             py::arg("values"));
}

void bind_model(py::module_& module) {
  bind_struct(module, "ProfiledRows", std::pair("rows", &ProfiledRows::rows),
              std::pair("layers", &ProfiledRows::layers), std::pair("edges", &ProfiledRows::edges),
              std::pair("shared", &ProfiledRows::shared));
  bind_struct(module, "Block", std::pair("first", &Block::first), std::pair("end", &Block::end));
  bind_struct(module, "ProfiledModel", std::pair("microbatches", &ProfiledModel::microbatches),
              std::pair("can_cut", &ProfiledModel::can_cut),
              std::pair("blocks", &ProfiledModel::blocks),
              std::pair("seconds_per_update_byte", &ProfiledModel::seconds_per_update_byte),
              std::pair("seconds_per_action", &ProfiledModel::seconds_per_action));
}

void bind_cluster(py::module_& module) {
  bind_struct(module, "Link", std::pair("latency", &Link::latency),
              std::pair("bandwidth", &Link::bandwidth));
  bind_struct(module, "Servers", std::pair("devices_per_server", &Servers::devices_per_server),
              std::pair("inside", &Servers::inside), std::pair("outside", &Servers::outside));
  bind_struct(module, "Mesh", std::pair("rows", &Mesh::rows), std::pair("columns", &Mesh::columns),
              std::pair("row", &Mesh::row), std::pair("column", &Mesh::column));
  bind_struct(module, "LinkMatrix", std::pair("num_devices", &LinkMatrix::num_devices),
              std::pair("links", &LinkMatrix::links));
  bind_struct(module, "Price", std::pair("from_hour", &Price::from_hour),
              std::pair("per_hour", &Price::per_hour));
  bind_struct(module, "PlannedType", std::pair("name", &DeviceType::name),
              std::pair("slowness", &DeviceType::slowness),
              std::pair("memory_bytes", &DeviceType::memory_bytes),
              std::pair("prices", &DeviceType::prices));
  bind_struct(module, "AllReduceTime", std::pair("ranks", &AllReduceTime::ranks),
              std::pair("bytes", &AllReduceTime::bytes),
              std::pair("seconds", &AllReduceTime::seconds));
  bind_struct(module, "PlannedCluster", std::pair("types", &Cluster::types),
              std::pair("type_of", &Cluster::type_of), std::pair("topology", &Cluster::topology),
              std::pair("all_reduce", &Cluster::all_reduce));
}

void bind_options(py::module_& module) {
  bind_struct(
      module, "PlanOptions", std::pair("batch", &PlanOptions::batch),
      std::pair("largest_batch", &PlanOptions::largest_batch),
      std::pair("width", &PlanOptions::width), std::pair("num_stages", &PlanOptions::num_stages),
      std::pair("schedules", &PlanOptions::schedules),
      std::pair("stages_per_rank", &PlanOptions::stages_per_rank),
      std::pair("recompute", &PlanOptions::recompute),
      std::pair("objective", &PlanOptions::objective), std::pair("slack", &PlanOptions::slack),
      std::pair("num_batches", &PlanOptions::num_batches),
      std::pair("start_within", &PlanOptions::start_within),
      std::pair("gradient", &PlanOptions::gradient), std::pair("state", &PlanOptions::state),
      std::pair("kept", &PlanOptions::kept), std::pair("shares_state", &PlanOptions::shares_state),
      std::pair("steps_on_host", &PlanOptions::steps_on_host),
      std::pair("microbatches_behind", &PlanOptions::microbatches_behind),
      std::pair("unequal_replicas", &PlanOptions::unequal_replicas),
      std::pair("max_late_share", &PlanOptions::max_late_share),
      std::pair("reserved", &PlanOptions::reserved));
}

struct FoundPlan {
  Evaluation plan;
  double price_per_hour = 0;  // of its devices, now
  Start start;
};

struct BestPlans {
  std::vector<FoundPlan> plans;
  Explanation why;
};

void bind_found(py::module_& module) {
  py::class_<PlannedStage>(module, "PlannedStage")
      .def_readonly("first", &PlannedStage::first)
      .def_readonly("end", &PlannedStage::end)
      .def_readonly("devices", &PlannedStage::devices)
      .def_readonly("costs", &PlannedStage::costs)
      .def_readonly("message", &PlannedStage::message)
      .def_readonly("frozen_bytes", &PlannedStage::frozen_bytes)
      .def_readonly("message_bytes", &PlannedStage::message_bytes)
      .def_readonly("num_versions", &PlannedStage::num_versions)
      .def_readonly("most_in_flight", &PlannedStage::most_in_flight)
      .def_readonly("peak_bytes", &PlannedStage::peak_bytes)
      .def_readonly("memory_limit", &PlannedStage::memory_limit)
      .def_readonly("blocks", &PlannedStage::blocks);
  py::class_<FoundPlan> found(module, "FoundPlan");
  // Defines an attribute by a function of the plan.
  const auto define = [&](const char* name, auto value) {
    found.def_property_readonly(name, [value](const FoundPlan& self) { return value(self.plan); });
  };
  using Plan = const Evaluation&;
  define("schedule", [](Plan plan) { return std::string(plan.candidate.shape.method->name); });
  define("width", [](Plan plan) { return plan.candidate.width; });
  define("num_stages", [](Plan plan) { return plan.candidate.shape.depth(); });
  define("stages_per_rank", [](Plan plan) { return plan.candidate.shape.stages_per_rank; });
  define("microbatch_rows", [](Plan plan) { return plan.candidate.rows; });
  // One number, or one for each replica.
  define("num_microbatches", [](Plan plan) -> py::object {
    const std::vector<int>& of_replicas = plan.candidate.microbatches;
    if (of_replicas.empty()) return py::int_(plan.candidate.shape.num_microbatches);
    return py::tuple(py::cast(of_replicas));
  });
  define("batch", [](Plan plan) { return plan.candidate.batch(); });
  define("recompute", [](Plan plan) { return plan.candidate.recompute; });
  define("seconds_per_batch", [](Plan plan) { return plan.time.seconds; });
  define("rows_per_second", [](Plan plan) { return plan.candidate.batch() / plan.time.seconds; });
  define("bubble", [](Plan plan) { return plan.time.bubble; });
  define("peak_bytes", [](Plan plan) { return plan.peak_bytes; });
  define("stages", [](Plan plan) { return plan.stages; });
  found.def_readonly("price_per_hour", &FoundPlan::price_per_hour)
      .def_property_readonly("start_hour", [](const FoundPlan& self) { return self.start.hour; })
      .def_property_readonly("total_price", [](const FoundPlan& self) { return self.start.price; });
  py::class_<BestPlans>(module, "BestPlans")
      .def_readonly("plans", &BestPlans::plans)
      .def_property_readonly("bound_by", [](const BestPlans& self) { return self.why.bound_by; })
      .def_property_readonly("lost_by", [](const BestPlans& self) { return self.why.lost_by; });
}

BestPlans find_plans(const ProfiledModel& model, const Cluster& cluster,
                     const PlanOptions& options) {
  const py::gil_scoped_release no_gil;
  const PlanProblem problem = {model, cluster, options};
  const std::vector<Evaluation> plans = best_plans(problem);
  BestPlans best = {.plans = {}, .why = explain(problem, plans)};
  for (const Evaluation& plan : plans) {
    best.plans.push_back(
        {.plan = plan,
         .price_per_hour = price_per_hour_now(cluster, plan.devices.devices()),
         .start = start_of(problem, plan.devices, plan.time.seconds / plan.candidate.batch())});
  }
  return best;
}

}  // namespace

void bind_plan(py::module_& module) {
  bind_split(module);
  bind_model(module);
  bind_cluster(module);
  bind_options(module);
  bind_found(module);
  module.def("best_plans", &find_plans, py::arg("model"), py::arg("cluster"), py::arg("options"));
  module.def("planned_schedules", &planned_schedules);
  module.attr("EQUALLY_GOOD") = kEquallyGood;
  py::class_<PlannedShape>(module, "PlannedShape")
      .def_readonly("num_versions", &PlannedShape::num_versions)
      .def_readonly("mean_delay", &PlannedShape::mean_delay)
      .def_readonly("most_in_flight", &PlannedShape::most_in_flight)
      .def_readonly("most_recomputed", &PlannedShape::most_recomputed)
      .def_readonly("recomputes_together", &PlannedShape::recomputes_together)
      .def_readonly("stages_of_ranks", &PlannedShape::stages_of_ranks)
      .def_readonly("in_flight_of_ranks", &PlannedShape::in_flight_of_ranks);
  module.def(
      "planned_shape",
      [](const std::string& name, int num_stages, int num_microbatches, int stages_per_rank) {
        return planned_shape(name, {num_stages, num_microbatches, stages_per_rank});
      },
      py::arg("name"), py::arg("num_stages"), py::arg("num_microbatches"),
      py::arg("stages_per_rank"));
}

}  // namespace pd2
