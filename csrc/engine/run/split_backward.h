// A microbatch's backward in two halves: I, what other stages wait for, and W, what may come later.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <unordered_set>
#include <utility>
#include <vector>

namespace pd2 {

// Where a backward begins, and the gradients there.
struct Incoming {
  torch::autograd::edge_list roots{};
  torch::autograd::variable_list gradients{};
};

// One call of autograd's engine, which accumulates the weights' gradients; nothing without roots.
void run_autograd(const Incoming& incoming, bool keep_graph);

// Together the halves add to the weights' gradients the bits that one backward adds.
//
// The first cuts the edges that lead from linear layers, convolutions and embeddings to their
// weights, so that autograd computes these layers' input gradients only and keeps what reached
// them; the second cuts their other edges and runs them again. Layers need not be rewritten for
// that: whatever ends in these operators is split. All other weights get their gradients in the
// first half: the caller holds those until the second, because the gradients of the batch before
// may still be in the accumulators.
class SplitBackward {
 public:
  // I of the backward.
  void run_input_half(const Incoming& incoming);
  // W, once.
  void run_weight_half();

 private:
  using NodePtr = decltype(torch::autograd::Edge::function);

  // An edge that leads from an operator to the accumulator of one of its weights.
  struct WeightEdge {
    std::size_t index = 0;  // among the operator's edges
    torch::autograd::Edge edge;
  };
  struct Deferred {
    NodePtr node;
    std::vector<WeightEdge> weights;
    std::shared_ptr<at::Tensor> gradient;  // that reached the operator in the first half
  };
  class Graph;
  class Capture;
  // Cuts the deferrable edges; `kept` gets the nodes that they lead from, over and to.
  void defer(const Graph& graph, std::unordered_set<const torch::autograd::Node*>& kept);

  std::vector<Deferred> deferred_;
};

}  // namespace pd2
