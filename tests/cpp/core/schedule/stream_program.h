// What a rank's device does on which stream, as data: what each piece of work waits for, reads and
// writes. It proves that the fences between the streams are enough for every schedule that passes
// validate(), which therefore has no rule about them.
//
// Streams of one rank (engine/streams.h; messages have the transport's), and the fences between
// them, each recorded by the work on its left and waited for by that on its right:
//
//   caller   inputs given       -> inputs    the batch's copies to the device
//   inputs   inputs taken       -> caller    who may write its tensors again
//   inputs   inputs staged      -> compute   the batch's first action
//   caller   given              -> compute   the batch's first action: the caller may have read or
//                                            written weights
//   receives received           -> compute   F, and B or I
//   compute  message ready      -> sends     of the same
//   compute  losses ready       -> losses    after the batch's last F of the last stage
//   compute  gradients complete -> update    recorded when U is begun
//   update   version ready      -> compute   the first F that reads it
//   update   gradients free     -> compute   the first B (W) that adds to the buffer again
//   update   updated            -> caller    after a drain
//   compute  computed           -> caller    after a drain
//
// Not here: memory that is freed serves again when the streams that use it are done (use_on()),
// and sums of gradients have fences of their own. What a rank orders it orders without the others'
// help, so each is looked at alone, and a clock has a number for each stream of one rank.

#pragma once

#include "core/schedule/unroll.h"

#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace pd2::testing {

enum class StreamKind { kCaller, kInputs, kReceives, kCompute, kSends, kUpdates, kLosses };
inline constexpr int kNumStreams = 7;

enum class FenceKind {
  kInputsGiven,
  kInputsTaken,
  kInputsStaged,
  kGiven,
  kReceived,
  kMessageReady,
  kLossesReady,
  kGradientsComplete,
  kVersionReady,
  kGradientsFree,
  kUpdated,
  kComputed,
};
inline constexpr int kNumFences = 12;

std::string_view name_of(StreamKind stream);
std::string_view name_of(FenceKind fence);

// A recorded event. It is waited for once.
struct FenceId {
  FenceKind kind = FenceKind::kGiven;
  int stage = 0;            // 0 if it is the rank's
  std::int64_t number = 0;  // microbatch (of gradients: -1 - microbatch), batch or version

  auto operator<=>(const FenceId&) const = default;
};

enum class MemoryKind {
  kCallerInputs,
  kInputs,     // of a batch
  kWeights,    // by slot
  kGradients,  // by buffer
  kState,      // the optimizer's
  kReceived,   // of a microbatch, values or gradients
  kSent,
  kLosses,  // of a batch
};

// What belongs together and is read, or written, by one piece of work.
struct MemoryId {
  MemoryKind kind = MemoryKind::kWeights;
  int stage = 0;
  std::int64_t number = 0;

  auto operator<=>(const MemoryId&) const = default;
};

std::string_view name_of(MemoryKind memory);

struct Access {
  enum How { kRead, kWrite, kLast } how = kRead;  // the last one reads, and frees
  MemoryId memory = {};
};

struct Work {
  StreamKind stream = StreamKind::kCompute;
  std::string_view what = {};
  std::vector<FenceId> waits = {};
  std::vector<Access> accesses = {};
  std::vector<FenceId> records = {};
};

// Where a stage's gradients are: in one buffer, in two by turns, or where the update is to write
// the version that it makes of them, among one slot more than there are versions.
enum class GradientPlaces { kOne, kTwo, kRotating };

// A rank's work of runs of so many batches, each of which ends with a drain, in the order in which
// it is launched.
class StreamProgram {
 public:
  // The schedule must outlive it, and pass validate().
  StreamProgram(const Schedule& schedule, int rank, GradientPlaces gradients)
      : schedule_(schedule), rank_(rank), gradients_(gradients) {}

  // Calls use(work) for each piece of the next run, of which it keeps nothing.
  template <typename Use>
  void run(int num_batches, Use use);

 private:
  std::vector<Work> begin_batch(int batch) const;
  std::vector<Work> works_of(const Action& action, std::int64_t microbatch) const;
  std::vector<Work> drain() const;
  // `number`: of a FenceId's message.
  static Work receive(int stage, std::int64_t number);
  static void send(std::vector<Work>& works, int stage, std::int64_t number);
  std::vector<Work> forward(int stage, std::int64_t microbatch) const;
  std::vector<Work> backward(const Action& action, std::int64_t microbatch) const;
  std::vector<Work> update(int stage, int batch) const;
  int num_slots(int stage) const {
    return schedule_.num_versions[stage] + (gradients_ == GradientPlaces::kRotating);
  }
  MemoryId weights(int stage, std::int64_t version) const {
    return {MemoryKind::kWeights, stage, version % num_slots(stage)};
  }
  MemoryId gradients(int stage, int batch) const;
  // Whether the rank has a first stage, or a last one, which takes targets.
  bool has_inputs() const;
  // The version whose update must be done before gradients of the batch are written.
  int version_before_gradients(int stage, int batch) const;

  const Schedule& schedule_;
  const int rank_;
  const GradientPlaces gradients_;
  int next_batch_ = 0;
};

// Whether every read comes after the write that it needs, and every write after what was read and
// written there: by the order of a stream, and by fences. Returns what is not in order, "" if all
// is. `without`: fences of this kind are neither recorded nor waited for.
std::string stream_problem(const Schedule& schedule, GradientPlaces gradients,
                           std::optional<FenceKind> without = std::nullopt);

template <typename Use>
void StreamProgram::run(int num_batches, Use use) {
  const std::int64_t m = schedule_.num_microbatches;
  const std::int64_t first_of_run = next_batch_ * m;
  const auto use_all = [&](const std::vector<Work>& works) {
    for (const Work& work : works) use(work);
  };
  const auto run_list = [&](ListKind list, int batch) {
    for (const Action& action : actions(schedule_.ranks[rank_], list)) {
      const std::int64_t microbatch = batch * m + action.microbatch;
      if (microbatch >= first_of_run) use_all(works_of(action, microbatch));
    }
  };
  for (int batch = next_batch_; batch < next_batch_ + num_batches; ++batch) {
    use_all(begin_batch(batch));
    run_list(batch == next_batch_ ? ListKind::kPrologue : ListKind::kSteady, batch);
  }
  next_batch_ += num_batches;
  run_list(ListKind::kEpilogue, next_batch_ - 1);
  use_all(drain());
}

}  // namespace pd2::testing
