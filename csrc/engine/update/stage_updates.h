// When a stage's updates happen: with the gradients complete and the step asked for, beside the
// next microbatches.
#pragma once

#include "engine/stage/stage.h"
#include "engine/update/background.h"
#include "engine/update/clipping.h"

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>

namespace pd2 {

// What a stage's updates are given by whoever runs the stage.
struct UpdateSurroundings {
  std::function<void()> begin_thread;  // called first in the updates' own thread
  std::function<bool()> is_stopped;    // then nobody waits any longer; from any thread
  // In place of the update's own time: calls `update` and tells how long it took. `run`: the
  // batch's last.
  std::function<void(std::int64_t run, std::int64_t version, const std::function<void()>& update)>
      record;
  std::function<void(std::int64_t run)> failed;  // called while the exception is handled
};

// Used by the stage's executor thread.
class StageUpdates {
 public:
  using Apply = std::function<void(Stage&)>;

  StageUpdates(Stage& stage, UpdateSurroundings surroundings);

  // The batch's gradients are complete, as its last run's are: begins the update if it has been
  // submitted. It goes on beside what follows until finish().
  void reach(std::int64_t run, std::int64_t batch);
  // Of the batch whose last run it is. Begins the update now if the gradients are complete.
  void submit(std::int64_t run, Apply apply);
  // Whether gradients are complete whose update has not been submitted.
  bool is_due() const { return complete_.has_value(); }
  // The version that was being made, if any, can be read. Throws ChannelAborted when stopped.
  void finish();

  // While nothing is under way.
  void set_clipping(std::optional<Clipping> clipping) { clipping_ = std::move(clipping); }
  // By which the losses of the run's microbatches, which read `version`, are multiplied: so are
  // its gradients, until its update. All runs of a batch have the first one's scale.
  float scale_losses(std::int64_t run, bool begins_batch, std::int64_t version);
  // Waits for what is under way, which is_stopped() ends; no update begins after that.
  void end() { background_.reset(); }
  // After that, and of all stages that share the norm.
  void drop_connections();

 private:
  struct Complete {
    std::int64_t run = 0, batch = 0;
  };
  void apply(const Complete& gradients, const Apply& apply, float loss_scale);

  Stage& stage_;
  const UpdateSurroundings around_;
  std::optional<Clipping> clipping_;
  std::map<std::int64_t, float> loss_scales_;  // of runs that have not been updated
  std::map<std::int64_t, Apply> submitted_;    // by last run, gradients incomplete
  std::optional<Complete> complete_;           // whose update has not been submitted
  bool is_under_way_ = false;
  std::unique_ptr<Background> background_;  // ends first
};

}  // namespace pd2
