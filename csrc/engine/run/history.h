// A microbatch's forward as autograd remembers it: where its backward begins and ends.
#pragma once

#include "engine/channels/channel.h"
#include "engine/run/run.h"

#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace pd2 {

using NodePtr = decltype(torch::autograd::Edge::function);

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

struct History {
  std::vector<NodePtr> sinks;                               // by inbound edge
  std::vector<std::vector<torch::autograd::Edge>> outputs;  // by outbound edge
  torch::autograd::Edge loss;

  // Before a forward: gradients of what it received end in sinks.
  void add_sinks(std::vector<Message>& inbound);
  // After it.
  void keep_edges(const ForwardResult& result);
  void clear() { *this = {}; }
};

}  // namespace pd2
