// The step of a stage whose optimizer works in the host's memory.
#include "core/check.h"
#include "engine/stage/stage.h"

#include <algorithm>

namespace pd2 {

void Stage::step_on_host(std::span<const GroupOptions> groups) {
  const auto not_stepped = std::ranges::find(stepped_, nullptr, &Stepped::by);
  PD2_ASSERT(not_stepped == stepped_.end(), "an optimizer without a fused pass works on the host");
  host_->take_changes(slots_[update_.from], masters_);
  host_->begin_sending();
  for (std::size_t bucket = 0; bucket < host_->buckets().size(); ++bucket) {
    host_->await(bucket);
    for (Fused& fused : optimizers_) {
      if (fused.bucket != bucket) {
        continue;
      }
      const at::Tensor& weights = host_->weights(fused.buffer);
      fused.optimizer->step(weights, host_->gradients(fused.buffer), weights, groups,
                            fused.of_members(host_->has_gradient(fused.buffer)),
                            masters_[fused.buffer], update_.factor);
    }
    host_->send(bucket, slots_[update_.to][host_->buckets()[bucket].dtype]);
  }
  host_->end_sending();
}

}  // namespace pd2
