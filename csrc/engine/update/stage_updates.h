// When a stage's updates are executed: once the gradients are complete and the update has been
// submitted, at the same time as the next microbatches.
#pragma once

#include "engine/discards.h"
#include "engine/stage/stage.h"
#include "engine/update/background.h"
#include "engine/update/batch_verdicts.h"
#include "engine/update/clipping.h"
#include "engine/update/device_work.h"
#include "engine/update/version_copies.h"

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>

namespace pd2 {

// By which a stage's updates call the stage's executor.
struct UpdateCallbacks {
  std::function<void()> begin_thread;  // called first in the updates' own thread
  std::function<bool()> is_stopped;    // true: nothing waits any longer; called from any thread
  // Calls `update` and records how long it took. `run`: the batch's last.
  std::function<void(std::int64_t run, std::int64_t version, const std::function<void()>& update)>
      record;
  std::function<void(std::int64_t run)> failed;  // called while the exception is handled
  std::shared_ptr<Discards> discards;            // null: no batch is ever discarded
};

// Used by the stage's executor thread.
//
// The update of a discarded batch changes nothing: no weight, moment or count. With verdicts every
// update first waits until no stage can fail in the batch any more. Without, it is made as soon as
// this stage can.
class StageUpdates {
 public:
  using Apply = std::function<void(Stage&)>;

  StageUpdates(Stage& stage, UpdateCallbacks callbacks);

  // The gradients of the batch, and of its last run, are complete: begins the update if it has been
  // submitted. The update goes on in its own thread until finish().
  void reach(std::int64_t run, std::int64_t batch);
  // Submits the update of the batch whose last run `run` is, and begins it if the gradients are
  // complete.
  void submit(std::int64_t run, Apply apply);
  // What the stage's `compute` is given from now on comes after the updates that made the version
  // and those before.
  void await(std::int64_t version);
  // Before the next batch's first gradients: waits until they have a buffer. Throws ChannelAborted
  // when stopped.
  void free_gradients();
  // Whether forwards wait for what other stages' updates have to tell.
  bool are_joint() const { return (clipping_ && clipping_->norm) || stage_.gradients().is_tied(); }
  // Whether gradients are complete whose update has not been submitted.
  bool is_due() const { return complete_.has_value(); }
  // Waits for the update under way, if any, whose version can be read then. Throws ChannelAborted
  // when stopped.
  void finish();

  // Calls `copy` in a thread of its own once `version` has been made, at once if it has. No later
  // update begins before `copy` has returned: what updates alone change stays as it is meanwhile.
  void copy_after(std::int64_t version, std::function<void()> copy) {
    copies_.copy_after(version, std::move(copy), [this](Background& copier) { wait_for(copier); });
  }
  // finish(), and waits for copies under way.
  void settle();

  // While nothing is under way. With one stage per rank a thread may wait for the others' word;
  // with several these have to go on meanwhile.
  void set_verdicts(std::shared_ptr<BatchVerdicts> verdicts, bool is_alone);
  // Forgets the batch and all later ones, and runs from that one on. Drained, in all processes that
  // hold the stage. finish() comes after it, for all stages: replicas may wait for each other's.
  void take_back(std::int64_t batch, std::int64_t run);
  // Batches and runs get numbers that others had, as other versions were loaded. Drained.
  void count_anew();
  // While nothing is under way.
  void set_clipping(std::optional<Clipping> clipping) { clipping_ = std::move(clipping); }
  // The factor of the losses of the run's microbatches, which read `version`, and so of the run's
  // gradients until its update. All runs of a batch have the scale of the first.
  float scale_losses(std::int64_t run, bool begins_batch, std::int64_t version);
  // From any thread; others may keep it.
  const std::shared_ptr<DeviceWork>& work() const { return work_; }
  // Waits for the update under way, which is_stopped() ends; no update begins after that.
  void end();
  // Releases the connections of the norm. After end() of all stages that share it.
  void drop_connections();

 private:
  struct Complete {
    std::int64_t run = 0, batch = 0;
  };
  void begin(const Complete& gradients, const Apply& apply);
  // Calls `make`, which says whether it has made a version, in the updates' own thread.
  void start(const Complete& gradients, std::function<bool()> make);
  // False if the batch is discarded: nothing was changed.
  bool apply(const Complete& gradients, const Apply& apply, float loss_scale);
  bool is_discarded(std::int64_t batch) const {
    return callbacks_.discards && callbacks_.discards->covers(batch);
  }
  // Waits for the verdict, if there will be one.
  bool is_good(const Complete& gradients) const;
  void give_word(std::int64_t run);
  void drop(const Complete& gradients) const;
  void begin_work();
  void exchange_shares();  // by the update under way, after its step
  void wait_for(Background& background) const;

  Stage& stage_;
  const UpdateCallbacks callbacks_;
  std::optional<Clipping> clipping_;
  std::map<std::int64_t, float> loss_scales_;  // of runs that have not been updated
  std::map<std::int64_t, Apply> submitted_;    // by the batch's last run; gradients incomplete
  std::optional<Complete> complete_;           // gradients whose update has not been submitted
  std::shared_ptr<BatchVerdicts> verdicts_;    // null: none
  std::optional<std::int64_t> given_;          // the last run for which the stage gave its word
  bool is_alone_ = false;
  bool is_under_way_ = false;
  bool has_begun_ = false;              // the stage's update, of the one under way
  bool is_made_ = false;                // by the one under way; once that has ended
  std::int64_t made_next_ = 0;          // the version that the one under way makes
  Fence end_;                           // of the one under way; once that has ended
  std::map<std::int64_t, Fence> ends_;  // by the version that an update makes, not awaited so far
  const std::shared_ptr<DeviceWork> work_;
  VersionCopies copies_;
  std::unique_ptr<Background> background_;  // ends first
};

}  // namespace pd2
