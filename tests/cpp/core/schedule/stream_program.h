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
// Where versions are saved, a thread has them copied on a stream and waits for it, and the host
// waits for that thread:
//
//   update   version made       -> copies    recorded when U is done
//   copies   copied             -> compute   before the next U is begun, and in a drain
//
// Where the optimizer works on the host (engine/stage/host_mirror.h), its thread is a stream here,
// and what it does before it gives a stream something is a fence:
//
//   compute  gradients given    -> down      recorded when U is begun
//   host     stepped            -> down      the next U, which begins when the thread is done
//   down     fetched            -> host
//   down     gradients fetched  -> compute   the first B (W) that adds to the one buffer again
//   up       sent               -> host      the next step, which writes the host's weights again
//   update   slot free          -> up        after "gradients complete"
//   host     weights stepped    -> up
//   up       weights sent       -> update    before "version ready"
//
// Not here: memory that is freed serves again when the streams that use it are done (use_on()).
// Sums of gradients have no stream of their own: what a bucket's sum waits for is what the last
// backward has given to `compute` by then, all else is on `update`, in the order of the updates.
// Nor are buckets of the host's, whose fences are these, and what only a batch needs that is left
// out. What a rank orders it orders without the others' help, so each is looked at alone, and a
// clock has a number for each stream of one rank.

#pragma once

#include "core/schedule/unroll.h"

#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace pd2::testing {

enum class StreamKind {
  kCaller,
  kInputs,
  kReceives,
  kCompute,
  kSends,
  kUpdates,
  kLosses,
  kCopies,
  kDown,
  kHost,
  kUp,
};
inline constexpr int kNumStreams = 11;

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
  kVersionMade,
  kCopied,
  kGradientsGiven,
  kStepped,
  kFetched,
  kGradientsFetched,
  kSent,
  kSlotFree,
  kWeightsStepped,
  kWeightsSent,
};
inline constexpr int kNumFences = 22;

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
  kLosses,         // of a batch
  kHostGradients,  // of the batch whose update is made
  kHostWeights,    // the newest
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
// the version that it makes of them, among one slot more than there are versions. From one buffer,
// or from such slots, they may be fetched to the host, where the optimizer works.
enum class GradientPlaces { kOne, kTwo, kRotating, kOneOfHost, kRotatingOfHost };

// A rank's work of runs of so many batches, each of which ends with a drain, in the order in which
// it is launched.
class StreamProgram {
 public:
  // The schedule must outlive it, and pass validate(). `saves`: every version is copied, with the
  // optimizer's state and the older versions that the next batch reads.
  StreamProgram(const Schedule& schedule, int rank, GradientPlaces gradients, bool saves)
      : schedule_(schedule), rank_(rank), gradients_(gradients), saves_(saves) {}

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
  std::vector<Work> step(int stage, int batch) const;
  std::vector<Work> step_on_host(int stage, int batch) const;
  Work save(int stage, int version) const;
  bool rotates() const {
    return gradients_ == GradientPlaces::kRotating || gradients_ == GradientPlaces::kRotatingOfHost;
  }
  bool steps_on_host() const {
    return gradients_ == GradientPlaces::kOneOfHost ||
           gradients_ == GradientPlaces::kRotatingOfHost;
  }
  int num_slots(int stage) const { return schedule_.num_versions[stage] + rotates(); }
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
  const bool saves_;
  int first_batch_ = 0, next_batch_ = 0;  // of the run; after it
};

// Whether every read comes after the write that it needs, and every write after what was read and
// written there: by the order of a stream, and by fences. Returns what is not in order, "" if all
// is. `without`: fences of this kind are neither recorded nor waited for. `saves`: see
// StreamProgram.
std::string stream_problem(const Schedule& schedule, GradientPlaces gradients,
                           std::optional<FenceKind> without = std::nullopt, bool saves = false);

template <typename Use>
void StreamProgram::run(int num_batches, Use use) {
  const std::int64_t m = schedule_.num_microbatches;
  first_batch_ = next_batch_;
  const std::int64_t first_of_run = first_batch_ * m;
  const auto use_all = [&](const std::vector<Work>& works) {
    for (const Work& work : works) use(work);
  };
  const auto run_list = [&](ListKind list, int batch) {
    for (const Action& action : actions(schedule_.ranks[rank_], list)) {
      const std::int64_t microbatch = batch * m + action.microbatch;
      if (microbatch >= first_of_run) use_all(works_of(action, microbatch));
    }
  };
  for (int batch = first_batch_; batch < first_batch_ + num_batches; ++batch) {
    use_all(begin_batch(batch));
    run_list(batch == first_batch_ ? ListKind::kPrologue : ListKind::kSteady, batch);
  }
  next_batch_ += num_batches;
  run_list(ListKind::kEpilogue, next_batch_ - 1);
  use_all(drain());
}

}  // namespace pd2::testing
