// The planner, as Python sees it: structs as tuples of their fields in order.
#include "core/plan/plan.h"

#include "bindings/bindings.h"
#include "core/check.h"
#include "core/plan/schedule_rules.h"
#include "core/schedule/generate.h"

#include <array>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace pd2 {
namespace {

using LayerRow = std::array<double, 6>;
using RowsRow =
    std::tuple<int, std::vector<LayerRow>, std::vector<std::tuple<int, int, std::int64_t>>,
               std::vector<std::tuple<double, double, double, std::vector<int>>>>;
using ModelRow = std::tuple<std::vector<RowsRow>, std::vector<bool>,
                            std::vector<std::pair<int, int>>, double, double>;
using LinkRow = std::pair<double, double>;
using TypeRow = std::tuple<std::string, double, double, std::vector<std::pair<double, double>>>;
using ClusterRow = std::tuple<std::vector<TypeRow>, std::vector<int>, std::string, std::vector<int>,
                              std::vector<LinkRow>, std::vector<std::tuple<int, double, double>>>;
using OptionsRow =
    std::tuple<int, int, std::vector<std::string>, std::vector<int>, std::vector<std::string>,
               std::string, double, double, double, double, double, int, int, double>;

ProfiledModel read_model(const ModelRow& row) {
  ProfiledModel model;
  const auto& [microbatches, can_cut, blocks, per_update_byte, per_action] = row;
  for (const auto& [rows, layers, edges, shared] : microbatches) {
    ProfiledRows& profiled = model.microbatches.emplace_back();
    profiled.rows = rows;
    for (const auto& [f, i, w, activations, parameters, trained] : layers) {
      profiled.layers.push_back({f, i, w, activations, parameters, trained});
    }
    for (const auto& [producer, consumer, bytes] : edges) {
      profiled.edges.push_back({producer, consumer, bytes});
    }
    for (const auto& [kept, trained, frozen, holders] : shared) {
      PD2_CHECK(!holders.empty(), "shared: no layers, it needs those that share something");
      profiled.shared.push_back({.producer = holders.front(),
                                 .consumers = {holders.begin() + 1, holders.end()},
                                 .kept_bytes = kept,
                                 .trained_bytes = trained,
                                 .frozen_bytes = frozen});
    }
  }
  model.can_cut = can_cut;
  for (const auto& [first, end] : blocks) model.blocks.push_back({first, end});
  model.seconds_per_update_byte = per_update_byte;
  model.seconds_per_action = per_action;
  return model;
}

Topology read_topology(const std::string& kind, const std::vector<int>& sizes,
                       const std::vector<LinkRow>& rows, int num_devices) {
  std::vector<Link> links;
  for (const auto& [latency, bandwidth] : rows) links.push_back({latency, bandwidth});
  if (kind == "matrix") return LinkMatrix{num_devices, std::move(links)};
  PD2_CHECK(links.size() == 2, "links: ", links.size(), ", topology: ", kind, ": it has 2");
  if (kind == "servers" && sizes.size() == 1) return Servers{sizes[0], links[0], links[1]};
  if (kind == "mesh" && sizes.size() == 2) return Mesh{sizes[0], sizes[1], links[0], links[1]};
  detail::throw_value_error("topology: " + kind + ", known: servers, mesh, matrix");
}

Cluster read_cluster(const ClusterRow& row) {
  Cluster cluster;
  const auto& [types, type_of, kind, sizes, links, all_reduce] = row;
  for (const auto& [name, slowness, memory, prices] : types) {
    DeviceType& type = cluster.types.emplace_back(DeviceType{name, slowness, memory, {}});
    for (const auto& [hour, price] : prices) type.prices.push_back({hour, price});
  }
  cluster.type_of = type_of;
  cluster.topology = read_topology(kind, sizes, links, cluster.num_devices());
  for (const auto& [ranks, bytes, seconds] : all_reduce) {
    cluster.all_reduce.push_back({ranks, bytes, seconds});
  }
  return cluster;
}

Recompute parse_recompute(const std::string& name) {
  for (const Recompute way : {Recompute::kNone, Recompute::kStages, Recompute::kBlocks}) {
    if (name == to_string(way)) return way;
  }
  detail::throw_value_error("recompute: \"" + name + "\", known: none, stages, blocks");
}

Objective parse_objective(const std::string& name) {
  if (name == "throughput") return Objective::kThroughput;
  if (name == "cost") return Objective::kCost;
  if (name == "memory") return Objective::kMemory;
  detail::throw_value_error("objective: \"" + name + "\", known: throughput, cost, memory");
}

PlanOptions read_options(const OptionsRow& row) {
  PlanOptions options;
  const auto& [batch, largest_batch, schedules, stages_per_rank, recompute, objective, slack,
               num_batches, start_within, gradient, state, width, num_stages, reserved] = row;
  options.reserved = reserved;
  options.batch = batch;
  options.width = width;
  options.num_stages = num_stages;
  options.largest_batch = largest_batch;
  options.schedules = schedules;
  options.stages_per_rank = stages_per_rank;
  options.recompute.clear();
  for (const std::string& name : recompute) options.recompute.push_back(parse_recompute(name));
  options.objective = parse_objective(objective);
  options.slack = slack;
  options.num_batches = num_batches;
  options.start_within = start_within;
  options.gradient = gradient;
  options.state = state;
  return options;
}

py::dict write_stage(const PlannedStage& stage, const ScheduleRule& rule) {
  py::dict fields;
  const StageCosts& costs = stage.costs;
  fields["layers"] = py::make_tuple(stage.first, stage.end);
  fields["devices"] = py::tuple(py::cast(stage.devices));
  fields["forward"] = costs.forward;
  fields["input_grad"] = costs.input_grad;
  fields["weight_grad"] = costs.weight_grad;
  fields["recompute"] = costs.recompute;
  fields["message"] = stage.message;
  fields["update"] = costs.update;
  fields["all_reduce"] = costs.all_reduce;
  fields["num_versions"] = rule.num_versions;
  fields["weight_bytes"] = costs.weight_bytes;
  fields["frozen_bytes"] = stage.frozen_bytes;
  fields["gradient_bytes"] = costs.gradient_bytes;
  fields["state_bytes"] = costs.state_bytes;
  fields["most_in_flight"] = stage.most_in_flight;
  fields["activation_bytes"] = costs.activation_bytes;
  fields["input_bytes"] = costs.input_bytes;
  fields["peak_bytes"] = stage.peak_bytes;
  fields["memory_limit"] = stage.memory_limit;
  fields["blocks"] = stage.blocks;
  return fields;
}

py::dict write_plan(const PlanProblem& problem, const Evaluation& plan) {
  py::dict fields;
  const Candidate& candidate = plan.candidate;
  const ScheduleRule& rule = *candidate.shape.rule;
  fields["schedule"] = std::string(rule.name);
  fields["width"] = candidate.width;
  fields["num_stages"] = candidate.shape.depth();
  fields["stages_per_rank"] = candidate.shape.stages_per_rank;
  fields["microbatch_rows"] = candidate.rows;
  fields["num_microbatches"] = candidate.shape.num_microbatches;
  fields["recompute"] = to_string(candidate.recompute);
  fields["seconds_per_batch"] = plan.time.seconds;
  fields["bubble"] = plan.time.bubble;
  fields["price_per_hour"] = price_per_hour_now(problem.cluster, plan.devices.devices());
  const Start start = start_of(problem, plan.devices, plan.time.seconds / plan.candidate.batch());
  fields["start_hour"] = start.hour;
  fields["total_price"] = start.price;
  fields["peak_bytes"] = plan.peak_bytes;
  py::list stages;
  for (const PlannedStage& stage : plan.stages) stages.append(write_stage(stage, rule));
  fields["stages"] = stages;
  return fields;
}

py::tuple plan_for_python(const ModelRow& model, const ClusterRow& cluster,
                          const OptionsRow& options) {
  const PlanProblem problem = {read_model(model), read_cluster(cluster), read_options(options)};
  std::vector<Evaluation> plans;
  Explanation why;
  {
    const py::gil_scoped_release no_gil;
    plans = best_plans(problem);
    why = explain(problem, plans);
  }
  py::list written;
  for (const Evaluation& plan : plans) written.append(write_plan(problem, plan));
  return py::make_tuple(written, why.bound_by, why.lost_by);
}

// What the planner knows of a schedule of these sizes, which is not made: versions of the weights;
// by stage the most microbatches in flight, and the most whose forward has run again; the stages on
// each rank. Throws ValueError for a schedule that is not planned, and sizes that it has not.
py::tuple planned_shape(const std::string& name, int num_stages, int num_microbatches,
                        int stages_per_rank) {
  const ScheduleRule& rule = schedule_rule(name);
  const bool is_whole = num_stages >= 1 && num_microbatches >= 1 && stages_per_rank >= 1 &&
                        num_stages % stages_per_rank == 0;
  const int ranks = is_whole ? num_stages / stages_per_rank : 0;
  if (!is_whole || (rule.is_bidirectional && ranks < 2) ||
      least_microbatches(rule, ranks, stages_per_rank, num_microbatches) != num_microbatches) {
    make_schedule(name, num_stages, num_microbatches, stages_per_rank);  // which tells its rule
    detail::throw_value_error(detail::concat("schedule: \"", name, "\", num_stages: ", num_stages,
                                             ", num_microbatches: ", num_microbatches,
                                             ", stages_per_rank: ", stages_per_rank,
                                             ": it has no such sizes"));
  }
  const PipelineShape shape = {&rule, ranks, stages_per_rank, num_microbatches};
  std::vector<int> in_flight;
  std::vector<int> recomputed;
  for (int stage = 0; stage < num_stages; ++stage) {
    in_flight.push_back(most_in_flight(shape, stage));
    recomputed.push_back(most_recomputed(shape, stage));
  }
  std::vector<std::vector<int>> stages;
  for (int rank = 0; rank < ranks; ++rank) {
    const auto on_rank = shape.stages_on(rank);
    stages.emplace_back(on_rank.begin(), on_rank.end());
  }
  return py::make_tuple(rule.num_versions, in_flight, recomputed, stages);
}

}  // namespace

void bind_plan(py::module_& module) {
  module.def("planned_schedules", &planned_schedules);
  module.def("planned_shape", &planned_shape, py::arg("name"), py::arg("num_stages"),
             py::arg("num_microbatches"), py::arg("stages_per_rank"));
  module.def("best_plans", &plan_for_python, py::arg("model"), py::arg("cluster"),
             py::arg("options"));
}

}  // namespace pd2
