// The trainable state of one stage: weight slots, gradients, optimizer state.
#pragma once

#include "engine/stage/gradient_path.h"
#include "engine/stage/masters.h"
#include "engine/stage/slots.h"
#include "engine/stage/step_place.h"
#include "engine/streams.h"

#include <ATen/core/Tensor.h>

#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace pd2 {

// Bytes that belong to parameters; padding to 64-byte boundaries apart.
struct StageBytes {
  std::int64_t weights = 0;
  std::int64_t masters = 0;
  std::int64_t gradients = 0;
  std::int64_t kept_gradients = 0;  // to be added together: the most at once
  std::int64_t optimizer_state = 0;
  std::int64_t padding = 0;
  std::int64_t replica_sums = 0;  // what replicas receive of each other's gradients
  std::int64_t host_copies = 0;   // of weights and gradients, where the optimizer works on the host
  std::int64_t on_host = 0;       // of all these, then
};

struct StageOptions {
  int num_versions = 1;
  StagePrecision precision{};
  GradientPathOptions gradients{};
  std::shared_ptr<const StageStreams> streams{};  // null: on the CPU
};

// What a stage has, in the order in which an update uses it: the way of the batch's gradients to
// the step, what it steps and by what, and the slots of the versions. Where all buffers take turns
// the step writes W(t + 1) over the gradients of batch t, line by line as it reads them, and may go
// on while the next batch's gradients are added up elsewhere.
//
// What has to do with gradients is given to the calling thread's stream: `compute` of the stage's,
// or `update` between begin_update() and publish().
//
// Used by the stage's executor thread; by other threads only while that executor is drained. The
// calls of an update between begin_update() and publish() may come from another thread, as is said
// there.
class Stage {
 public:
  // Copies the values of `parameters` (trainable, on the device of the streams).
  Stage(const std::vector<at::Tensor>& parameters, const std::vector<std::string>& names,
        StageOptions options);
  Stage(const Stage&) = delete;
  Stage& operator=(const Stage&) = delete;

  // Where the stage works.
  const StageStreams& streams() const { return *streams_; }
  bool on_host() const { return !streams_->compute; }
  const StageLayout& layout() const { return layout_; }
  const Slots& slots() const { return slots_; }
  WeightStore& versions() { return slots_.versions(); }
  const WeightStore& versions() const { return slots_.versions(); }
  GradientPath& gradients() { return gradients_; }
  const GradientPath& gradients() const { return gradients_; }
  Masters& masters() { return masters_; }
  const Masters& masters() const { return masters_; }
  StepPlace& step_place() { return step_place_; }
  const StepPlace& step_place() const { return step_place_; }

  // `slot_parameter` is the leaf tensor over slots().weight(slot, parameter) that the stage's
  // module uses.
  void attach(std::size_t parameter, const at::Tensor& slot_parameter);

  // Announces the first gradients of the batch.
  void begin_batch(std::int64_t batch) { gradients_.begin_batch(gradient_buffer(batch)); }
  // Announces the gradients of any of its microbatches, the first one's too.
  void begin_microbatch(std::int64_t batch, bool is_last) {
    gradients_.begin_microbatch(gradient_buffer(batch), is_last);
  }
  // The version whose update, or that which was not made instead, must have ended before gradients
  // of the batch come: it used their buffer.
  std::int64_t version_before_gradients(std::int64_t batch) const;
  // Whether the next batch's gradients may be added up while an update is under way.
  bool overlaps() const { return slots_.rotates() || has_two_gradients_ || gradients_.host(); }
  // Waits for some time at most until the next batch's gradients may be given to `compute`, if this
  // stage overlaps; returns whether they may.
  bool wait_for_gradients_buffer(std::chrono::milliseconds at_most);

  // Chooses how the buffers are used, as far as versions and dtypes leave a choice. The pipeline
  // must be drained. `reads_first`: the step reads a gradient before it writes the weight there.
  // `waits`: updates wait for other stages, so that the next batch's gradients need a buffer more
  // where the buffers cannot take turns. Those of a tied stage always do. Gradients that wait for
  // their step are summed before they are moved; throws ChannelAborted when stopped meanwhile.
  void arrange(
      bool reads_first, bool waits, const std::function<bool()>& is_stopped = [] { return false; });

  // Batches have not been, whose gradients may lie where an older version was: the delay begins
  // anew, at the newest one.
  void take_back();
  // After weights were loaded into the newest slot: the delay restarts.
  void restart_delay();
  // The versions `oldest` .. `newest` are about to be written to their slots, and `newest` to the
  // masters, while the pipeline is drained. Throws ValueError if there are not so many slots.
  void load_versions(std::int64_t oldest, std::int64_t newest);

  // Begins the update with the batch's gradients, which are complete.
  void begin_update(std::int64_t batch);
  // Instead of it: the batch is discarded. Replicas that may not know yet get what they wait for.
  void begin_nothing(std::int64_t batch);

  // The following belong to the update that has begun, as what gradients() says does; until
  // publish() any thread may call them.

  void scale_gradients(const at::Tensor& factor);  // one number, on the host or the stage's device
  // The same, if nobody but the step reads them after that: where it can, the step does it.
  void scale_gradients_in_step(const at::Tensor& factor);
  // Begins W(t+1) in the slot that is returned: see StepPlace::step().
  int write_next(std::span<const GroupOptions> groups);
  // Instead of write_next(): W(t+1) is W(t), nothing is stepped.
  void repeat_newest() { step_place_.repeat(update_.from, update_.to); }
  // See GradientPath.
  void exchange_shares(const std::function<bool()>& is_stopped) {
    gradients_.exchange_shares(slots_.flat(update_.to), is_stopped);
  }
  // Ends the update: its version can be read, or none was made.
  void publish() { versions().publish(); }
  void drop() { versions().drop_next(); }

  StageBytes bytes() const;

 private:
  std::size_t gradient_buffer(std::int64_t batch) const;

  const std::shared_ptr<const StageStreams> streams_;
  const StageLayout layout_;
  Slots slots_;
  GradientPath gradients_;
  Masters masters_;
  StepPlace step_place_;
  bool reads_first_ = true;
  bool has_two_gradients_ = false;  // after the slots, or instead of slots of another dtype
  struct Update {
    int from = 0, to = 0;  // slots
    at::Tensor factor{};   // by which the step multiplies; undefined: 1
  };
  Update update_;
};

}  // namespace pd2
