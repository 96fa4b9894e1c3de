#include "core/plan/problem.h"

#include "core/check.h"

#include <cmath>

namespace pd2 {
namespace {

void check_cost(int rows, std::size_t layer, const char* what, double value) {
  PD2_CHECK(std::isfinite(value) && value >= 0, what, "[", layer, "] of ", rows, " rows: ", value,
            ": it must be finite and >= 0");
}

void check_shared(const std::vector<Value>& values, int num_layers) {
  for (const Value& value : values) {
    int before = value.producer;
    for (const int layer : value.consumers) {
      PD2_CHECK(before >= 0 && before < layer && layer < num_layers, "shared: layer ", before,
                " and then ", layer, ": it needs increasing layers < ", num_layers);
      before = layer;
    }
    for (const double bytes : {value.kept_bytes, value.trained_bytes, value.frozen_bytes}) {
      PD2_CHECK(std::isfinite(bytes) && bytes >= 0, "shared: ", bytes,
                " bytes: it must be finite and >= 0");
    }
  }
}

void check(const ProfiledRows& profiled, int num_layers) {
  const int rows = profiled.rows;
  PD2_CHECK(profiled.layers.size() == std::size_t(num_layers), "layers of ", rows,
            " rows: ", profiled.layers.size(), ", of the first: ", num_layers,
            ": every microbatch size needs the same layers");
  for (std::size_t i = 0; i < profiled.layers.size(); ++i) {
    const LayerCost& layer = profiled.layers[i];
    check_cost(rows, i, "forward", layer.forward);
    check_cost(rows, i, "input_grad", layer.input_grad);
    check_cost(rows, i, "weight_grad", layer.weight_grad);
    check_cost(rows, i, "activation_bytes", layer.activation_bytes);
    check_cost(rows, i, "parameter_bytes", layer.parameter_bytes);
    check_cost(rows, i, "trained_bytes", layer.trained_bytes);
    PD2_CHECK(layer.trained_bytes <= layer.parameter_bytes, "trained_bytes[", i,
              "]: ", layer.trained_bytes, ", parameter_bytes: ", layer.parameter_bytes,
              ": they are a part of these");
  }
  for (const Edge& edge : profiled.edges) {
    PD2_CHECK(edge.producer >= 0 && edge.producer < edge.consumer && edge.consumer < num_layers &&
                  edge.bytes >= 0,
              "edge: ", edge.producer, " to ", edge.consumer, ", ", edge.bytes,
              " bytes: it needs 0 <= producer < consumer < ", num_layers, " and bytes >= 0");
  }
  check_shared(profiled.shared, num_layers);
}

void check(const ProfiledModel& model) {
  PD2_CHECK(!model.microbatches.empty() && model.num_layers() >= 1,
            "microbatches: ", model.microbatches.size(),
            ": a profile needs at least one size and one layer");
  const int n = model.num_layers();
  int rows = 0;
  for (const ProfiledRows& profiled : model.microbatches) {
    PD2_CHECK(profiled.rows > rows, "rows: ", profiled.rows, " after ", rows,
              ": microbatch sizes must rise from 1");
    rows = profiled.rows;
    check(profiled, n);
  }
  PD2_CHECK(model.can_cut.empty() || model.can_cut.size() == std::size_t(n - 1),
            "can_cut: ", model.can_cut.size(), ", layers: ", n,
            ": needs layers - 1 entries, or none");
  int end = 0;
  for (const Block& block : model.blocks) {
    PD2_CHECK(end <= block.first && block.first < block.end && block.end <= n,
              "block: ", block.first, " to ", block.end, ", the one before ends at ", end,
              ": blocks must be in order, of the ", n, " layers");
    end = block.end;
  }
  PD2_CHECK(std::isfinite(model.seconds_per_update_byte) && model.seconds_per_update_byte >= 0,
            "seconds_per_update_byte: ", model.seconds_per_update_byte,
            ": it must be finite and >= 0");
  PD2_CHECK(std::isfinite(model.seconds_per_action) && model.seconds_per_action >= 0,
            "seconds_per_action: ", model.seconds_per_action, ": it must be finite and >= 0");
}

void check(const PlanOptions& options) {
  PD2_CHECK(options.batch >= 1, "batch: ", options.batch, ": it must be >= 1");
  PD2_CHECK(options.largest_batch >= options.batch, "largest_batch: ", options.largest_batch,
            ", batch: ", options.batch, ": it must be at least the batch");
  PD2_CHECK(options.width >= 0, "width: ", options.width, ": it must be >= 0");
  PD2_CHECK(options.num_stages >= 0, "num_stages: ", options.num_stages, ": it must be >= 0");
  PD2_CHECK(!options.schedules.empty(), "schedules: none: give at least one");
  for (const std::string& name : options.schedules) planned_method(name);
  for (const int v : options.stages_per_rank) {
    PD2_CHECK(v >= 2, "stages_per_rank: ", v, ": schedules with chunks are tried with >= 2");
  }
  PD2_CHECK(!options.recompute.empty(), "recompute: none: give at least one way");
  PD2_CHECK(std::isfinite(options.slack) && options.slack >= 0, "slack: ", options.slack,
            ": it must be finite and >= 0");
  PD2_CHECK(std::isfinite(options.num_batches) && options.num_batches >= 0,
            "num_batches: ", options.num_batches, ": it must be finite and >= 0");
  PD2_CHECK(std::isfinite(options.start_within) && options.start_within >= 0,
            "start_within: ", options.start_within, " hours: it must be finite and >= 0");
  PD2_CHECK(std::isfinite(options.gradient) && options.gradient >= 0,
            "gradient: ", options.gradient, ": it must be finite and >= 0");
  PD2_CHECK(std::isfinite(options.state) && options.state >= 0, "state: ", options.state,
            ": it must be finite and >= 0");
}

}  // namespace

const char* to_string(Recompute recompute) {
  constexpr const char* kNames[] = {"none", "stages", "blocks"};
  return kNames[static_cast<int>(recompute)];
}

const char* to_string(Objective objective) {
  constexpr const char* kNames[] = {"throughput", "cost", "memory"};
  return kNames[static_cast<int>(objective)];
}

void check(const PlanProblem& problem) {
  check(problem.model);
  check(problem.cluster);
  check(problem.options);
}

}  // namespace pd2
