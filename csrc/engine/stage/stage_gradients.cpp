// Where a backward's gradients go.
#include "engine/stage/stage.h"

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
}

}  // namespace pd2
