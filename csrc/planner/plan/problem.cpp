#include "planner/plan/problem.h"

#include "core/check.h"
#include "planner/partition/split_costs.h"

#include <string>

namespace pd2 {
namespace {

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
    PD2_CHECK(profiled.layers.size() == std::size_t(n), "layers of ", rows,
              " rows: ", profiled.layers.size(), ", of the first: ", n,
              ": every microbatch size needs the same layers");
    const std::string where = detail::concat("of ", rows, " rows: ");
    check_layers(where, profiled.layers);
    check_edges(where, profiled.edges, n);
    check_values(where, profiled.shared, n);
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
  check_amount(model.seconds_per_update_byte, "seconds_per_update_byte");
  check_amount(model.seconds_per_action, "seconds_per_action");
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
  const PlanOptions& options = problem.options;
  PD2_CHECK(options.largest_batch >= options.batch, "largest_batch: ", options.largest_batch,
            ", batch: ", options.batch, ": it must be at least the batch");
}

}  // namespace pd2
