// Where a stage's backward ends: the gradients of the values that other stages sent.
#pragma once

#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>

namespace pd2 {

// The autograd node that the values of an inbound edge seem to come from. It keeps the gradients
// that reach it. Unlike a leaf's `.grad` it changes neither their strides nor their order, and an
// in-place operation on a value is as legal as in the unsplit model.
class InputSink : public torch::autograd::Node {
 public:
  // The first to be run of the nodes that are ready, since another stage waits.
  InputSink() : Node(/*sequence_nr=*/UINT64_MAX) {}

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    captured = std::move(gradients);
    if (on_captured) {
      on_captured();
    }
    return {};
  }
  std::string name() const override { return "StageInput"; }

  torch::autograd::variable_list captured;
  std::function<void()> on_captured;
};

// torch holds nodes by shared_ptr up to some version, by intrusive_ptr from then on.
template <typename Holder>
Holder make_input_sink() {
  if constexpr (std::is_same_v<Holder, std::shared_ptr<torch::autograd::Node>>) {
    return std::make_shared<InputSink>();
  } else {
    return c10::make_intrusive<InputSink>();
  }
}

}  // namespace pd2
