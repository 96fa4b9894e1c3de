#include "engine/update/stage_updates.h"

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
  const Complete gradients{run, batch};
  const auto submitted = submitted_.find(run);
  if (submitted == submitted_.end()) {
    complete_ = gradients;
    return;
  }
  Apply apply = std::move(submitted->second);
  submitted_.erase(submitted);
  const auto scaled = loss_scales_.find(run);
  const float loss_scale = scaled == loss_scales_.end() ? 1 : scaled->second;
  loss_scales_.erase(loss_scales_.begin(), loss_scales_.upper_bound(run));
  settle();
  stage_.begin_update(batch);
  // Without slack the next forward waits for this update anyway; but if the update itself waits for
  // other stages, those of this rank must come to theirs meanwhile.
  if (!stage_.has_slack() && !clipping_ && !stage_.is_tied()) {
    this->apply(gradients, apply, loss_scale);
    stage_.publish();
    begin_copies(batch + 1);
    return;
  }
  is_under_way_ = true;
  background_->start([this, gradients, apply = std::move(apply), loss_scale] {
    try {
      this->apply(gradients, apply, loss_scale);
      begin_copies(gradients.batch + 1);
    } catch (const ChannelAborted&) {
      // Another one's failure, or the end.
    } catch (...) {
      callbacks_.failed(gradients.run);
    }
  });
}

void StageUpdates::submit(std::int64_t run, Apply apply) {
  submitted_.emplace(run, std::move(apply));
  if (complete_ && complete_->run == run) {
    reach(run, std::exchange(complete_, std::nullopt)->batch);
  }
}

void StageUpdates::finish() {
  if (!is_under_way_) {
    return;
  }
  wait_for(*background_);
  is_under_way_ = false;
  stage_.publish();
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

void StageUpdates::settle() {
  finish();
  if (copier_) {
    wait_for(*copier_);
  }
}

void StageUpdates::end() {
  background_.reset();
  copier_.reset();
}

void StageUpdates::apply(const Complete& gradients, const Apply& apply, float loss_scale) {
  callbacks_.record(gradients.run, gradients.batch + 1, [&] {
    stage_.reduce(callbacks_.is_stopped);
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
