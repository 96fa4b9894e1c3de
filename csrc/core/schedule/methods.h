// The table of all schedules by name, with what is known of them before their lists are made.

#pragma once

#include "core/schedule/v_shape.h"

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace pd2 {

// The weight versions that a batch reads: the newest, the one before it, or (weight stashing) on
// every stage the newest there.
enum class Weights { kFlushed, kTwoVersions, kStashed };

// The order in which a rank takes its chunks: `ranks` microbatches of each in turn, or all of a
// batch.
enum class ChunkOrder { kDepthFirst, kBreadthFirst };

// The number of steps between a microbatch's forward and its backward on a rank.
enum class Lag {
  kRoundTrip,         // the way to the last stage and back
  kLongRoundTrip,     // twice: each message may take as long as a step
  kChunkedRoundTrip,  // Megatron's warm-up
  kWholeBatch,        // after all forwards
};

// The number of steps between a microbatch's I and its W: as much later as the rank's pipeline
// fills later, so that all ranks have the same number in flight.
enum class WeightLag { kNone, kFilling, kLongFilling };

// The sizes of a pipeline with stages_per_rank stages on each rank.
struct ScheduleSizes {
  int num_stages = 1;
  int num_microbatches = 1;
  int stages_per_rank = 1;

  int ranks() const { return num_stages / stages_per_rank; }
};

struct ScheduleMethod {
  std::string_view name;
  Weights weights = Weights::kFlushed;
  Lag lag = Lag::kRoundTrip;
  bool is_split = false;  // I before W
  WeightLag weight_lag = WeightLag::kNone;
  bool has_chunks = false;  // several stages a rank
  ChunkOrder order = ChunkOrder::kDepthFirst;
  // Of a schedule with two pipelines in opposite directions; 0: one pipeline.
  int microbatches_per_forward_slot = 0;
  VSteps v{};               // of a rank's two stages in a V
  bool is_fresh = false;    // of a batch those forwards alone are late that cannot wait
  bool is_planned = false;  // the planner chooses among these

  bool is_flushed() const { return weights == Weights::kFlushed; }
  bool is_v() const { return v != VSteps{}; }
  bool is_bidirectional() const { return microbatches_per_forward_slot > 0; }
  bool is_eager() const { return lag == Lag::kLongRoundTrip; }
  bool keeps_whole_batch() const { return lag == Lag::kWholeBatch; }
  // Steps between a forward and its backward on a rank.
  int lag_of(const ScheduleSizes& sizes, int rank) const;
  int weight_lag_of(int rank) const;

  // num_microbatches must be at least this, and a multiple of that.
  int least_microbatches(int ranks, int stages_per_rank) const;
  int microbatches_multiple_of(int ranks) const;
};

std::span<const ScheduleMethod> schedule_methods();

// The names of all methods, or of those that have the property.
std::vector<std::string> schedule_names(bool ScheduleMethod::*property = nullptr);

// "a, b, c"
std::string joined(const std::vector<std::string>& names);

// nullptr: there is none of that name.
const ScheduleMethod* find_method(std::string_view name);

// The rules of sizes that the method needs, like "num_microbatches >= num_stages".
std::vector<std::string> size_rules(const ScheduleMethod& method);

// Throws ValueError that names the rule and both values.
void check_sizes(const ScheduleMethod& method, const ScheduleSizes& sizes);

}  // namespace pd2
