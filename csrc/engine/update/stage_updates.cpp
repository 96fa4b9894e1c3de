#include "engine/update/stage_updates.h"

#include "core/check.h"
#include "engine/channels/channel.h"

#include <ATen/ops/scalar_tensor.h>
#include <c10/util/ScopeExit.h>

#include <chrono>
#include <iterator>

namespace pd2 {

StageUpdates::StageUpdates(Stage& stage, UpdateCallbacks callbacks)
    : stage_(stage),
      callbacks_(std::move(callbacks)),
      work_(std::make_shared<DeviceWork>(stage.streams())),
      copies_(stage.streams(), callbacks_.begin_thread, stage.versions().newest()),
      background_(std::make_unique<Background>(callbacks_.begin_thread)) {}

void StageUpdates::reach(std::int64_t run, std::int64_t batch) {
  give_word(run);
  const auto submitted = submitted_.find(run);
  if (submitted == submitted_.end()) {
    complete_ = {run, batch};
    return;
  }
  const Apply apply = std::move(submitted->second);
  submitted_.erase(submitted);
  begin({run, batch}, apply);
}

void StageUpdates::set_verdicts(std::shared_ptr<BatchVerdicts> verdicts, bool is_alone) {
  verdicts_ = std::move(verdicts);
  is_alone_ = is_alone;
  if (complete_) {  // of a batch that was trained before anybody asked for verdicts
    give_word(complete_->run);
  }
}

void StageUpdates::give_word(std::int64_t run) {
  if (verdicts_ && given_ != run) {
    verdicts_->give(run, callbacks_.is_stopped);
    given_ = run;
  }
}

void StageUpdates::begin(const Complete& gradients, const Apply& apply) {
  const auto scaled = loss_scales_.find(gradients.run);
  const float loss_scale = scaled == loss_scales_.end() ? 1 : scaled->second;
  loss_scales_.erase(loss_scales_.begin(), loss_scales_.upper_bound(gradients.run));
  settle();
  begin_work();
  has_begun_ = !is_discarded(gradients.batch);
  if (has_begun_) {
    stage_.begin_update(gradients.batch);
  } else {
    stage_.begin_nothing(gradients.batch);
  }
  // Without slack the next forward waits for this update anyway; but if the update itself waits for
  // other stages, those of this rank must come to theirs meanwhile, and receives be posted.
  const bool waits = clipping_ || are_joint() || (verdicts_ && !is_alone_);
  if (!stage_.slots().has_slack() && !waits && has_begun_) {
    const auto ended =
        c10::make_scope_exit([this] { work_->end_update(stage_.streams().compute); });
    await(gradients.batch);
    is_made_ = this->apply(gradients, apply, loss_scale);
    stage_.exchange_shares(callbacks_.is_stopped);
    if (is_made_) {
      stage_.publish();
      copies_.made(gradients.batch + 1, {Fence::of(stage_.streams().compute)});
    } else {
      stage_.drop();
    }
    return;
  }
  start(gradients, [=, this] { return this->apply(gradients, apply, loss_scale); });
}

// Begins no update after the fault: the gradients may have been made of what never came.
void StageUpdates::begin_work() {
  work_->begin_update();
  if (callbacks_.is_stopped()) {
    work_->drop_update();
    throw ChannelAborted();
  }
}

void StageUpdates::start(const Complete& gradients, std::function<bool()> make) {
  is_under_way_ = true;
  made_next_ = gradients.batch + 1;
  // The gradients, and all that read what the update writes to.
  const Fence complete = Fence::of(stage_.streams().compute);
  background_->start([this, gradients, make = std::move(make), complete] {
    const OnStream guard(stage_.streams().update);
    complete.hold_back(stage_.streams().update);
    try {
      const auto ended =
          c10::make_scope_exit([this] { work_->end_update(stage_.streams().update); });
      is_made_ = make();
      if (!stage_.gradients().exchanges_in_order()) {
        exchange_shares();
      }
    } catch (const ChannelAborted&) {
      // Another one's failure, or the end.
    } catch (...) {
      callbacks_.failed(gradients.run);
    }
  });
}

void StageUpdates::exchange_shares() {
  stage_.exchange_shares(callbacks_.is_stopped);
  end_ = Fence::of(stage_.streams().update);
  if (is_made_) {
    copies_.made(made_next_, {end_});
  }
}

void StageUpdates::submit(std::int64_t run, Apply apply) {
  if (complete_ && complete_->run == run) {
    begin(*std::exchange(complete_, std::nullopt), apply);
  } else {
    submitted_.emplace(run, std::move(apply));
  }
}

void StageUpdates::finish() {
  if (!is_under_way_) {
    return;
  }
  wait_for(*background_);
  is_under_way_ = false;
  if (stage_.gradients().exchanges_in_order()) {
    begin_work();
    const auto ended = c10::make_scope_exit([this] { work_->end_update(stage_.streams().update); });
    const OnStream guard(stage_.streams().update);
    exchange_shares();
  }
  if (stage_.streams().update) {
    ends_[made_next_] = std::exchange(end_, {});
  }
  if (is_made_) {
    stage_.publish();
  } else if (has_begun_) {
    stage_.drop();
  }
}

void StageUpdates::await(std::int64_t version) {
  const auto after = ends_.upper_bound(version);
  if (after != ends_.begin()) {
    std::prev(after)->second.hold_back(stage_.streams().compute);
    ends_.erase(ends_.begin(), after);
  }
}

void StageUpdates::free_gradients() {
  if (!stage_.overlaps()) {  // the one buffer is in use
    finish();
    return;
  }
  while (!stage_.wait_for_gradients_buffer(std::chrono::milliseconds(100))) {
    if (callbacks_.is_stopped()) {
      throw ChannelAborted();
    }
  }
}

bool StageUpdates::is_good(const Complete& gradients) const {
  if (verdicts_) {
    verdicts_->wait(gradients.run, callbacks_.is_stopped);
  }
  return !is_discarded(gradients.batch);
}

void StageUpdates::drop(const Complete& gradients) const {
  stage_.gradients().let_sums_end(callbacks_.is_stopped);
  stage_.gradients().end_update();
  if (clipping_ && clipping_->norm) {
    clipping_->norm->drop(gradients.run);
  }
}

void StageUpdates::take_back(std::int64_t batch, std::int64_t run) {
  PD2_ASSERT(!is_under_way_, "an update is under way");
  given_.reset();
  const std::int64_t newest = stage_.versions().newest();
  PD2_CHECK(newest <= batch, "batch ", batch, " is to be taken back, version ", newest,
            " has been made");
  if (newest == batch) {  // an evaluation comes after all batches, and changes nothing
    stage_.take_back();
  }
  submitted_.erase(submitted_.lower_bound(run), submitted_.end());
  loss_scales_.erase(loss_scales_.lower_bound(run), loss_scales_.end());
  if (complete_ && complete_->batch >= batch) {
    // No step will come here, but replicas whose steps have come may wait for this one's part.
    stage_.begin_nothing(complete_->batch);
    has_begun_ = false;
    start(*complete_, [this, gradients = *complete_] {
      drop(gradients);
      return false;
    });
    complete_.reset();
  }
  copies_.forget_after(batch);
}

void StageUpdates::count_anew() {
  PD2_ASSERT(!is_under_way_, "an update is under way");
  given_.reset();
  copies_.count_from(stage_.versions().newest());
}

void StageUpdates::wait_for(Background& background) const {
  do {
    if (callbacks_.is_stopped()) {
      throw ChannelAborted();
    }
  } while (!background.wait_for(std::chrono::milliseconds(100)));
  if (callbacks_.is_stopped()) {  // it may have failed
    throw ChannelAborted();
  }
}

void StageUpdates::settle() {
  finish();
  if (complete_) {  // its verdict may be forgotten, and must not be under way then
    is_good(*complete_);
  }
  if (Background* copier = copies_.thread()) {
    wait_for(*copier);
  }
}

void StageUpdates::end() {
  background_.reset();
  copies_.end();
}

bool StageUpdates::apply(const Complete& gradients, const Apply& apply, float loss_scale) {
  if (has_begun_ && stage_.gradients().frees_buffer()) {  // before others are waited for
    stage_.gradients().reduce(callbacks_.is_stopped);
  }
  if (!is_good(gradients)) {
    drop(gradients);
    return false;
  }
  const bool is_scaled = loss_scale != 1 || (clipping_ && clipping_->loss_scale);
  const auto unscaling =
      is_scaled ? std::optional<double>(static_cast<float>(1.0 / loss_scale)) : std::nullopt;
  bool is_made = true;
  callbacks_.record(gradients.run, gradients.batch + 1, [&] {
    stage_.gradients().reduce(callbacks_.is_stopped, unscaling);
    // Without verdicts a replica may have failed: what it gave to the sum means nothing.
    if (is_discarded(gradients.batch) && !verdicts_) {
      is_made = false;
      return;
    }
    stage_.gradients().sum_ties(gradients.batch, callbacks_.is_stopped);
    if (loss_scale != 1 &&
        !stage_.gradients().has_hook()) {  // as torch.amp.GradScaler.unscale_ does
      stage_.scale_gradients(at::scalar_tensor(*unscaling, at::kDouble));
    }
    if (!clipping_ || clipping_->apply(stage_, gradients.run, callbacks_.is_stopped)) {
      apply(stage_);
    } else {
      stage_.repeat_newest();
    }
  });
  if (!is_made) {
    drop(gradients);
    return false;
  }
  stage_.gradients().end_update();
  return true;
}

float StageUpdates::scale_losses(std::int64_t run, bool begins_batch, std::int64_t version) {
  const float of_run_before = loss_scales_.empty() ? 1.0F : loss_scales_.rbegin()->second;
  const auto [place, is_first] = loss_scales_.try_emplace(run, 1.0F);
  if (is_first && !begins_batch) {
    place->second = of_run_before;  // also where the scale was changed meanwhile
  } else if (is_first && clipping_ && clipping_->loss_scale) {
    place->second = clipping_->loss_scale->of_version(version);
  }
  return place->second;
}

void StageUpdates::drop_connections() {
  if (clipping_ && clipping_->norm) {
    clipping_->norm->drop_connections();
  }
}

}  // namespace pd2
