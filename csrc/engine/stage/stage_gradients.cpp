// Where a backward's gradients go, and what replicas make of them.
#include "core/check.h"
#include "engine/stage/stage.h"

#include <utility>

namespace pd2 {

void Stage::hold_gradients(std::vector<HeldGradient>* where) {
  for (auto& gradient : gradients_) {
    gradient->hold(where);
  }
}

Stage::GradientState Stage::gradient_state() const {
  GradientState state;
  for (const auto& gradient : gradients_) {
    state.push_back(gradient->state());
  }
  return state;
}

void Stage::set_gradient_state(const GradientState& state) {
  for (std::size_t dtype = 0; dtype < gradients_.size(); ++dtype) {
    gradients_[dtype]->set_added(state[dtype].second);
  }
  if (replicas_) {
    replicas_->forget_microbatch();
  }
  if (host_) {
    host_->forget_microbatch();
  }
}

void Stage::set_hook(ReplicaSum::Hook hook) {
  PD2_ASSERT(replicas_ && !host_, "a hook needs replicas, and gradients where the stage is");
  replicas_->set_hook(std::move(hook));
}

std::vector<std::vector<Stage::BucketPlace>> Stage::hooked_buckets() const {
  std::vector<std::vector<std::size_t>> parameters(packings_.size());  // [dtype][index]
  for (std::size_t i = 0; i < places_.size(); ++i) {  // which are in the packing's order
    parameters[places_[i].buffer].push_back(i);
  }
  std::vector<std::vector<BucketPlace>> buckets;
  for (const GradientBuckets::Bucket& bucket : replicas_->buckets()) {
    const FlatPacking& packing = *packings_[bucket.dtype];
    if (bucket.begin >= packing.numel()) {  // of flags alone
      continue;
    }
    std::vector<BucketPlace>& places = buckets.emplace_back();
    for (std::size_t index = bucket.first; index < bucket.last; ++index) {
      const ParameterView& view = packing.views()[index];
      places.push_back({parameters[bucket.dtype][index], view.offset - bucket.begin, view.numel});
    }
  }
  return buckets;
}

}  // namespace pd2
