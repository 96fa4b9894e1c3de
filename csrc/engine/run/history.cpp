#include "engine/run/history.h"

#include <torch/csrc/autograd/variable.h>

namespace pd2 {

void History::add_sinks(std::vector<Message>& inbound) {
  sinks.clear();
  for (Message& message : inbound) {
    NodePtr sink;
    if (message.differentiable()) {
      sink = make_input_sink<NodePtr>();
      for (std::size_t i = 0; i < message.tensors.size(); ++i) {
        if (message.requires_grad[i]) {
          torch::autograd::create_gradient_edge(message.tensors[i], sink);
        } else {
          // Every tensor of the message has a place in the sink, so that indices agree.
          sink->add_input_metadata(torch::autograd::Node::undefined_input());
        }
      }
    }
    sinks.push_back(std::move(sink));
  }
}

void History::keep_edges(const ForwardResult& result) {
  const auto edge_of = [](const at::Tensor& tensor) {
    return tensor.defined() && tensor.requires_grad() ? torch::autograd::impl::gradient_edge(tensor)
                                                      : torch::autograd::Edge();
  };
  outputs.clear();
  for (const Message& message : result.outbound) {
    std::vector<torch::autograd::Edge>& edges = outputs.emplace_back();
    for (const at::Tensor& tensor : message.tensors) {
      edges.push_back(edge_of(tensor));
    }
  }
  loss = edge_of(result.loss);
}

}  // namespace pd2
