#include "engine/run/split_backward.h"

#include "engine/gradients/grad_accumulator.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include <algorithm>
#include <typeindex>
#include <unordered_map>

namespace pd2 {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;

namespace {

// Whether an operator saved its tensors as they are. What hooks give back, such as those of a
// checkpoint, costs a forward each time, and a selective checkpoint gives it once.
template <typename Kind, auto... saved>
bool saved_plainly(const Node& node) {
  const auto& of_kind = static_cast<const Kind&>(node);
  return !((of_kind.*saved).has_hooks() || ...);
}

// Operators whose weight gradients cost as much as their input gradients, or have no input gradient
// at all, and whose backward computes each gradient by itself, only if it is needed.
bool is_deferrable(const Node& node) {
  using namespace torch::autograd::generated;  // NOLINT
  static const std::unordered_map<std::type_index, bool (*)(const Node&)> kinds = {
      {typeid(AddmmBackward0),
       saved_plainly<AddmmBackward0, &AddmmBackward0::mat1_, &AddmmBackward0::mat2_>},
      {typeid(MmBackward0), saved_plainly<MmBackward0, &MmBackward0::self_, &MmBackward0::mat2_>},
      {typeid(BmmBackward0),
       saved_plainly<BmmBackward0, &BmmBackward0::self_, &BmmBackward0::mat2_>},
      {typeid(BaddbmmBackward0),
       saved_plainly<BaddbmmBackward0, &BaddbmmBackward0::batch1_, &BaddbmmBackward0::batch2_>},
      {typeid(LinearBackward0),
       saved_plainly<LinearBackward0, &LinearBackward0::input_, &LinearBackward0::weight_>},
      {typeid(ConvolutionBackward0),
       saved_plainly<ConvolutionBackward0, &ConvolutionBackward0::input_,
                     &ConvolutionBackward0::weight_>},
      {typeid(EmbeddingBackward0),
       saved_plainly<EmbeddingBackward0, &EmbeddingBackward0::indices_>},
      {typeid(EmbeddingBagBackward0),
       saved_plainly<EmbeddingBagBackward0, &EmbeddingBagBackward0::indices_>},
  };
  const auto kind = kinds.find(typeid(node));
  return kind != kinds.end() && kind->second(node);
}

// A node with hooks runs once only.
bool has_hooks(Node& node) {
  return !node.pre_hooks().empty() || !node.post_hooks().empty() ||
         !node.tensor_pre_hooks().empty() || !node.retains_grad_hooks().empty();
}

}  // namespace

void run_autograd(const Incoming& incoming, bool keep_graph) {
  if (incoming.roots.empty()) {
    return;
  }
  torch::autograd::Engine::get_default_engine().execute(incoming.roots, incoming.gradients,
                                                        keep_graph, /*create_graph=*/false,
                                                        /*accumulate_grad=*/true);
}

// What reaches an operator, after all hooks.
class SplitBackward::Capture : public torch::autograd::FunctionPreHook {
 public:
  explicit Capture(std::shared_ptr<at::Tensor> gradient) : gradient_(std::move(gradient)) {}
  variable_list operator()(const variable_list& gradients) override {
    *gradient_ = gradients.front();
    return gradients;
  }

 private:
  std::shared_ptr<at::Tensor> gradient_;
};

// The nodes that a backward visits.
class SplitBackward::Graph {
 public:
  explicit Graph(const edge_list& roots) {
    for (const Edge& root : roots) {
      visit(root);
    }
    for (std::size_t i = 0; i < nodes_.size(); ++i) {  // grows meanwhile
      for (const Edge& edge : nodes_[i]->next_edges()) {
        visit(edge);
      }
    }
  }

  const std::vector<NodePtr>& nodes() const { return nodes_; }
  int num_edges_to(const Node* node) const { return num_edges_.at(node); }

  // The nodes from the edge to an accumulator, which is the last, if they serve nothing else; none
  // if they do.
  std::vector<const Node*> path_to_accumulator(const Edge& edge) const {
    std::vector<const Node*> path;
    for (const Edge* next = &edge; next->is_valid();) {
      Node& node = *next->function;
      path.push_back(&node);
      if (GradAccumulator::takes_from(node)) {
        return path;
      }
      const edge_list& edges = node.next_edges();
      if (std::ranges::count_if(edges, &Edge::is_valid) != 1 || num_edges_to(&node) != 1 ||
          node.num_inputs() != 1 || has_hooks(node)) {
        break;
      }
      next = &*std::ranges::find_if(edges, &Edge::is_valid);
    }
    return {};
  }

 private:
  void visit(const Edge& edge) {
    if (edge.is_valid() && ++num_edges_[edge.function.get()] == 1) {
      nodes_.push_back(edge.function);
    }
  }

  std::vector<NodePtr> nodes_;
  std::unordered_map<const Node*, int> num_edges_;
};

void SplitBackward::run_input_half(const Incoming& incoming) {
  const Graph graph(incoming.roots);
  std::unordered_set<const Node*> kept;  // what the second half runs
  defer(graph, kept);
  // Nothing is left for the second half of compiled stages, whose graphs must not be kept.
  run_autograd(incoming, /*keep_graph=*/!kept.empty());

  for (const Deferred& deferred : deferred_) {
    deferred.node->pre_hooks().clear();
  }
  for (const NodePtr& node : graph.nodes()) {
    if (!kept.contains(node.get())) {
      node->release_variables();
    }
  }
}

void SplitBackward::defer(const Graph& graph, std::unordered_set<const Node*>& kept) {
  struct Use {
    NodePtr node;
    std::size_t index;
    std::vector<const Node*> path;
  };
  std::vector<Use> uses;
  std::unordered_map<const Node*, int> num_uses;  // by accumulator
  for (const NodePtr& node : graph.nodes()) {
    if (!is_deferrable(*node) || has_hooks(*node)) {
      continue;
    }
    for (std::size_t i = 0; i < node->next_edges().size(); ++i) {
      std::vector<const Node*> path = graph.path_to_accumulator(node->next_edge(i));
      if (!path.empty()) {
        ++num_uses[path.back()];
        uses.push_back({node, i, std::move(path)});
      }
    }
  }
  for (const Use& use : uses) {
    // A weight is deferred if all its uses are: their gradients add up before it gets them.
    if (num_uses[use.path.back()] != graph.num_edges_to(use.path.back())) {
      continue;
    }
    if (deferred_.empty() || deferred_.back().node != use.node) {
      deferred_.push_back({use.node, {}, std::make_shared<at::Tensor>()});
      use.node->add_pre_hook(std::make_unique<Capture>(deferred_.back().gradient));
    }
    Edge& edge = use.node->next_edges()[use.index];
    deferred_.back().weights.push_back({use.index, std::exchange(edge, Edge())});
    kept.insert(use.node.get());
    kept.insert(use.path.begin(), use.path.end());
  }
}

void SplitBackward::run_weight_half() {
  Incoming incoming;
  for (Deferred& deferred : deferred_) {
    for (Edge& edge : deferred.node->next_edges()) {
      edge = Edge();
    }
    for (WeightEdge& weight : deferred.weights) {
      deferred.node->next_edges()[weight.index] = std::move(weight.edge);
    }
    if (deferred.gradient->defined()) {
      incoming.roots.emplace_back(deferred.node, 0);
      incoming.gradients.push_back(*deferred.gradient);
    }
  }
  run_autograd(incoming, /*keep_graph=*/false);
  deferred_.clear();
}

}  // namespace pd2
