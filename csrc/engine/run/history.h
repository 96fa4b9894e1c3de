// A microbatch's forward as autograd remembers it: where its backward begins and ends.
#pragma once

#include "engine/channels/channel.h"
#include "engine/run/run.h"

#include <torch/csrc/autograd/function.h>

#include <vector>

namespace pd2 {

using NodePtr = decltype(torch::autograd::Edge::function);

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
