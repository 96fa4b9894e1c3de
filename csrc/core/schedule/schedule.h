// Schedules as data: which rank does what in which order.
//
// A batch has num_microbatches = m microbatches. Batch t = 0 after a drain runs each rank's
// `prologue` (all forwards of the first batch and what else fits), every later batch runs `steady`,
// a drain runs `epilogue`. Microbatch numbers count from the first microbatch of the batch being
// run (in the epilogue: of the last batch run), so -1 is the previous batch's last. Actions of
// microbatches before the run's first are skipped: a stage may be several batches behind.
//
// The grids for d = 4, m = 4: rows are ranks, columns time, a backward drawn as long as a forward,
// primes count batches, * is an update. 2bw, two batches and a drain. The bubbles of the first and
// the last batch are paid once per drain, not once per batch:
//
//   rank 0 | F0 F1 F2 F3 .. .. .. B0 F0'B1 F1'B2 F2'B3*F3'B0'.. B1'.. B2'.. B3'*
//   rank 1 | .. F0 F1 F2 .. .. B0 F3 B1 F0'B2 F1'B3*F2'B0'F3'B1'.. B2'.. B3'*
//   rank 2 | .. .. F0 F1 .. B0 F2 B1 F3 B2 F0'B3*F1'B0'F2'B1'F3'B2'.. B3'*
//   rank 3 | .. .. .. F0 B0 F1 B1 F2 B2 F3 B3*F0'B0'F1'B1'F2'B2'F3'B3'*
//
// Rank 1's lists: prologue F0 F1 F2 B0 F3 B1, steady F0 B-2 F1 B-1 U-1 F2 B0 F3 B1, epilogue B2 B3
// U3. 1f1b (PipeDream-Flush): every batch is prologue == steady and idles (d-1)/(m+d-1):
//
//   rank 0 | F0 F1 F2 F3 .. .. .. B0 .. B1 .. B2 .. B3*
//   rank 1 | .. F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3*
//   rank 2 | .. .. F0 F1 .. B0 F2 B1 F3 B2 .. B3*
//   rank 3 | .. .. .. F0 B0 F1 B1 F2 B2 F3 B3*
//
// gpipe: backwards in microbatch order too, so that gradients add up in that order:
//
//   rank 0 | F0 F1 F2 F3 .. .. .. .. .. .. B0 B1 B2 B3*
//   rank 1 | .. F0 F1 F2 F3 .. .. .. .. B0 B1 B2 B3*
//   rank 2 | .. .. F0 F1 F2 F3 .. .. B0 B1 B2 B3*
//   rank 3 | .. .. .. F0 F1 F2 F3 B0 B1 B2 B3*
//
// chimera (bidirectional pipelines): ranks hold one stage of each of two pipelines over the same
// weights, the second one in the opposite direction (small letters), each with half the batch. What
// is a bubble in one is work in the other, and of 2 (d-1) slots d-2 stay idle. Both copies of a
// stage update together (*), with the sum of their gradients:
//
//   rank 0 | F0 .. F1 f0 b0 f1 b1 B0 *  B1 *
//   rank 1 | .. F0 f0 F1 f1 B0 b0 B1 b1 *  *
//   rank 2 | .. f0 F0 f1 F1 b0 B0 b1 B1 *  *
//   rank 3 | f0 .. f1 F0 B0 F1 B1 b0 *  b1 *
//
// The other generators' grids are typed out in tests/cpp/core/schedule/generate_test.cpp.

#pragma once

#include <algorithm>
#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace pd2 {

enum class ActionKind : char {
  kForward = 'F',
  kBackward = 'B',    // input and weight gradient together
  kInputGrad = 'I',   // first half of a backward: what the previous stage waits for
  kWeightGrad = 'W',  // second half
  kUpdate = 'U',      // the update of the batch that contains the microbatch
  // Not an action of a schedule: the part of a B or I that runs a forward again.
  kRecompute = 'R',
};

inline constexpr std::array kActionKinds{ActionKind::kForward,   ActionKind::kBackward,
                                         ActionKind::kInputGrad, ActionKind::kWeightGrad,
                                         ActionKind::kRecompute, ActionKind::kUpdate};

// The name of a kind in error texts, profiles and pictures.
std::string_view name_of(ActionKind kind);

struct Action {
  int stage = 0;
  ActionKind kind = ActionKind::kForward;
  int microbatch = 0;  // relative to the batch being run; an update names any of its batch

  auto operator<=>(const Action&) const = default;
};

// "<stage><kind><microbatch>": "2F0", "0B-1", "0U-1".
std::string to_string(const Action& action);

struct RankActions {
  std::vector<Action> prologue;
  std::vector<Action> steady;
  std::vector<Action> epilogue;

  bool operator==(const RankActions&) const = default;
};

// A value: copy it, change it, then ask validate() whether it is legal.
//
// With two pipelines every stage of the model exists twice: stages 0 .. d - 1 are pipeline 0's,
// stages d .. 2 d - 1 are the copies in pipeline 1, and `num_stages` counts both. A batch has
// `num_pipelines * num_microbatches` microbatches, the first `num_microbatches` are pipeline 0's;
// each pipeline numbers its own from 0. A batch's updates of the two copies happen together.
struct Schedule {
  std::string name;
  int num_pipelines = 1;
  int num_stages = 0;
  int num_microbatches = 0;  // of each pipeline
  // Per stage: batch t reads weight version max(t - delay, 0), version t + 1 is made by batch t's
  // update.
  std::vector<int> delay;
  // Per stage: so many forwards of a batch are late and read that version. The others read W(t),
  // which must be there. Empty: all are late.
  std::vector<int> late_forwards;
  std::vector<int> placement;     // stage -> rank
  std::vector<int> num_versions;  // per stage: weight versions kept, version v in slot v mod this
  std::vector<RankActions> ranks;

  // Stages of the model.
  int depth() const { return num_stages / num_pipelines; }
  bool has_one_delay() const {
    return std::ranges::adjacent_find(delay, std::not_equal_to()) == delay.end();
  }
  // late_forwards, also where it is empty; without a delay none is late.
  std::vector<int> late_forwards_of_each() const {
    std::vector<int> late;
    for (std::size_t stage = 0; stage < delay.size(); ++stage) {
      const bool is_stated = stage < late_forwards.size();
      const int of_delay = is_stated ? late_forwards[stage] : num_microbatches;
      late.push_back(delay[stage] > 0 ? of_delay : 0);
    }
    return late;
  }
  // Of all forwards of all stages: 0 to 1.
  double late_share() const {
    const std::vector<int> late = late_forwards_of_each();
    const double all = static_cast<double>(late.size()) * num_microbatches;
    return std::accumulate(late.begin(), late.end(), 0.0) / all;
  }
  // Whether forwards may read W(t): where all of a batch's first train_step are late, those of its
  // other ones.
  bool has_fresh_forwards() const {
    return !late_forwards.empty() && std::ranges::any_of(delay, [](int each) { return each > 0; });
  }
  // By how much the version that a forward reads is behind its batch. `microbatch`: its number in
  // the batch.
  int delay_of(int stage, int microbatch) const {
    return late_forwards.empty() || microbatch < late_forwards[stage] ? delay[stage] : 0;
  }
  // The same, `microbatch` counted as a list's actions do, or from the start of training.
  int delay_at(int stage, std::int64_t microbatch) const {
    const auto place = static_cast<int>(microbatch % num_microbatches);
    return delay_of(stage, place < 0 ? place + num_microbatches : place);
  }
  // Whether any backward has its two halves one after the other.
  bool splits_backward() const {
    const auto is_half = [](const Action& action) { return action.kind == ActionKind::kInputGrad; };
    return std::ranges::any_of(ranks, [&](const RankActions& rank) {
      return std::ranges::any_of(rank.prologue, is_half) ||
             std::ranges::any_of(rank.steady, is_half) ||
             std::ranges::any_of(rank.epilogue, is_half);
    });
  }
  bool is_first(int stage) const { return stage % depth() == 0; }
  bool is_last(int stage) const { return stage % depth() == depth() - 1; }
  int pipeline(int stage) const { return stage / depth(); }
  // The microbatches of a batch in all pipelines, and the number in the batch of what the stage's
  // pipeline calls `microbatch`.
  int total_microbatches() const { return num_pipelines * num_microbatches; }
  int number_in_batch(int stage, int microbatch) const {
    return pipeline(stage) * num_microbatches + microbatch;
  }
  // The stage's copy in the other pipeline, if there is one.
  std::optional<int> twin(int stage) const {
    if (num_pipelines == 1) return std::nullopt;
    return (stage + depth()) % num_stages;
  }

  bool operator==(const Schedule&) const = default;
};

// Most microbatches whose activations the stage holds at once: forwards done minus backwards done.
// Throws ValueError if there is no such stage.
int max_in_flight(const Schedule& schedule, int stage);

// The text form: `key: value` lines, then the sections [prologue], [steady], [epilogue] with one
// row per rank of comma-separated actions ("-": a rank that does nothing there):
//
//   name: 2bw
//   pipelines: 1               (may be left out)
//   stages: 2
//   microbatches: 2
//   delay: 1                   (one per stage, or one for all)
//   late: 2,1                  (late_forwards; may be left out)
//   placement: 0,1
//   versions: 2,2
//   [prologue]
//   0F0,0F1,0B0
//   1F0,1B0,1F1,1B1,1U1
//   [steady]
//   ...
//
// Blank lines, empty cells and everything after a '#' are ignored.
std::string to_text(const Schedule& schedule);

// The compute-only CSV of torch.distributed.pipelining: one row per rank, updates left out. Throws
// ValueError for a schedule that does not drain at every batch, or that has two pipelines: the CSV
// cannot say so.
std::string to_csv(const Schedule& schedule);

// Reads to_text's form; from_text(to_text(s)) == s. Also reads the compute-only CSV of
// torch.distributed.pipelining (one row per rank, "0F0,0F1,,0B0", no header, no updates; what
// DualPipeV overlaps, "(0F4;3B0)OVERLAP_F_B", is one action after the other) as a
// synchronous schedule: prologue == steady == the rows, each stage's update appended to its rank.
// Checks the form only, see validate() for the rest. Throws ValueError naming line and column.
Schedule from_text(std::string_view text);

}  // namespace pd2
