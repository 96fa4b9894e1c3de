#include "engine/update/stage_updates.h"

#include "core/check.h"
#include "engine/channels/channel.h"

#include <ATen/ops/scalar_tensor.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <utility>
#include <vector>

namespace pd2 {

StageUpdates::StageUpdates(Stage& stage, UpdateCallbacks callbacks)
    : stage_(stage),
      callbacks_(std::move(callbacks)),
      made_(stage.versions().newest()),
      background_(std::make_unique<Background>(callbacks_.begin_thread)) {}

void StageUpdates::reach(std::int64_t run, std::int64_t batch) {
  if (verdicts_) {
    verdicts_->give(run, callbacks_.is_stopped);
  }
  const auto submitted = submitted_.find(run);
  if (submitted == submitted_.end()) {
    complete_ = {run, batch};
    return;
  }
  const Apply apply = std::move(submitted->second);
  submitted_.erase(submitted);
  begin({run, batch}, apply);
}

void StageUpdates::begin(const Complete& gradients, const Apply& apply) {
  const auto scaled = loss_scales_.find(gradients.run);
  const float loss_scale = scaled == loss_scales_.end() ? 1 : scaled->second;
  loss_scales_.erase(loss_scales_.begin(), loss_scales_.upper_bound(gradients.run));
  settle();
  has_begun_ = !is_discarded(gradients.batch);
  if (has_begun_) {
    stage_.begin_update(gradients.batch);
  } else {
    stage_.begin_nothing(gradients.batch);
  }
  // Without slack the next forward waits for this update anyway; but if the update itself waits for
  // other stages, those of this rank must come to theirs meanwhile.
  const bool waits = clipping_ || stage_.is_tied() || (verdicts_ && !is_alone_);
  if (!stage_.has_slack() && !waits && has_begun_) {
    is_made_ = this->apply(gradients, apply, loss_scale);
    end_update(gradients);
    return;
  }
  is_under_way_ = true;
  background_->start([this, gradients, apply, loss_scale] {
    try {
      is_made_ = this->apply(gradients, apply, loss_scale);
      if (is_made_) {
        begin_copies(gradients.batch + 1);
      }
    } catch (const ChannelAborted&) {
      // Another one's failure, or the end.
    } catch (...) {
      callbacks_.failed(gradients.run);
    }
  });
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
  if (is_made_) {
    stage_.publish();
  } else if (has_begun_) {
    stage_.drop();
  }
}

void StageUpdates::end_update(const Complete& gradients) {
  if (is_made_) {
    stage_.publish();
    begin_copies(gradients.batch + 1);
  } else {
    stage_.drop();
  }
}

bool StageUpdates::is_good(const Complete& gradients) const {
  if (verdicts_) {
    verdicts_->wait(gradients.run, callbacks_.is_stopped);
  }
  return !is_discarded(gradients.batch);
}

void StageUpdates::drop(const Complete& gradients) const {
  stage_.let_sums_end(callbacks_.is_stopped);
  if (clipping_ && clipping_->norm) {
    clipping_->norm->drop(gradients.run);
  }
}

void StageUpdates::take_back(std::int64_t batch, std::int64_t run) {
  PD2_ASSERT(!is_under_way_, "an update is under way");
  submitted_.erase(submitted_.lower_bound(run), submitted_.end());
  loss_scales_.erase(loss_scales_.lower_bound(run), loss_scales_.end());
  if (complete_ && complete_->batch >= batch) {
    complete_.reset();
  }
  const std::lock_guard lock(copies_mutex_);
  to_copy_.erase(to_copy_.upper_bound(batch), to_copy_.end());
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

void StageUpdates::copy_after(std::int64_t version, std::function<void()> copy) {
  {
    const std::lock_guard lock(copies_mutex_);
    if (!copier_) {
      copier_ = std::make_unique<Background>(callbacks_.begin_thread);
    }
    to_copy_.emplace(version, std::move(copy));
    if (made_ < version) {
      return;
    }
  }
  wait_for(*copier_);  // the version may be copied a second time
  begin_copies(version);
}

void StageUpdates::begin_copies(std::int64_t made) {
  const std::lock_guard lock(copies_mutex_);
  made_ = made;
  const auto [first, last] = to_copy_.equal_range(made);
  if (first == last) {
    return;
  }
  std::vector<std::function<void()>> copies;
  std::transform(first, last, std::back_inserter(copies), [](auto& each) { return each.second; });
  to_copy_.erase(first, last);
  copier_->start([copies = std::move(copies)] {
    for (const auto& copy : copies) {
      copy();
    }
  });
}

void StageUpdates::give_up() {
  finish();
  if (complete_ && callbacks_.discards && !is_good(*complete_)) {
    stage_.begin_nothing(complete_->batch);
    given_up_ = std::exchange(complete_, std::nullopt);
  }
}

void StageUpdates::settle() {
  give_up();
  if (given_up_) {
    drop(*std::exchange(given_up_, std::nullopt));
  }
  if (copier_) {
    wait_for(*copier_);
  }
}

void StageUpdates::end() {
  background_.reset();
  copier_.reset();
}

bool StageUpdates::apply(const Complete& gradients, const Apply& apply, float loss_scale) {
  if (!is_good(gradients)) {
    drop(gradients);
    return false;
  }
  bool is_made = true;
  callbacks_.record(gradients.run, gradients.batch + 1, [&] {
    stage_.reduce(callbacks_.is_stopped);
    // Without verdicts a replica may have failed: what it gave to the sum means nothing.
    if (is_discarded(gradients.batch) && !verdicts_) {
      is_made = false;
      return;
    }
    stage_.sum_ties(gradients.batch, callbacks_.is_stopped);
    if (loss_scale != 1) {  // as torch.amp.GradScaler.unscale_ does
      stage_.scale_gradients(at::scalar_tensor(1.0 / loss_scale, at::kFloat));
    }
    if (!clipping_ || clipping_->apply(stage_, gradients.run, callbacks_.is_stopped)) {
      apply(stage_);
    } else {
      stage_.repeat_newest();
    }
  });
  if (!is_made) {
    drop(gradients);
  }
  return is_made;
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
  if (verdicts_) {
    verdicts_->drop_connections();
  }
}

}  // namespace pd2
