#include "engine/run/split_backward.h"

#include "engine/gradients/grad_accumulator.h"
#include "engine/run/history.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/conv1d.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/engine.h>

#include <functional>
#include <map>

namespace pd2 {
namespace {

using torch::autograd::Edge;

// Weights, an input that another stage sent, and a function of them.
class SplitBackwardTest : public ::testing::Test {
 protected:
  using Function = std::function<at::Tensor(const at::Tensor& input)>;

  // Everything that a backward gives: the input's gradient, then the weights'; undefined for none.
  std::vector<at::Tensor> gradients(const Function& function, const at::Tensor& input, bool split) {
    FlatPacking packing(weights_);
    GradAccumulator accumulator(packing, std::vector<std::string>(weights_.size(), "w"),
                                {packing.allocate(packing.dtype())});
    for (std::size_t i = 0; i < weights_.size(); ++i) {
      accumulator.attach(i, weights_[i]);
    }
    accumulator.begin_batch(0);
    at::Tensor received = input.detach();
    const auto sink = make_input_sink<decltype(Edge::function)>();
    torch::autograd::create_gradient_edge(received, sink);
    const at::Tensor output = function(received);
    const torch::autograd::edge_list roots{torch::autograd::impl::gradient_edge(output)};
    const torch::autograd::variable_list seeds{output.detach() * 0.5};
    if (split) {
      SplitBackward halves;
      std::vector<HeldGradient> held;
      accumulator.hold(&held);
      count_operators([&] { halves.run_input_half({roots, seeds}); }, input_half_);
      accumulator.hold(nullptr);
      for (const bool has : accumulator.has_gradient(0)) {
        EXPECT_FALSE(has) << "a weight got its gradient in the input half";
      }
      count_operators([&] { halves.run_weight_half(); }, weight_half_);
      for (const HeldGradient& each : held) {
        each.accumulator->add(each.parameter, each.gradient);
      }
    } else {
      torch::autograd::Engine::get_default_engine().execute(roots, seeds, false, false, true);
    }
    std::vector<at::Tensor> all = static_cast<InputSink&>(*sink).captured;
    all.resize(1);
    for (std::size_t i = 0; i < weights_.size(); ++i) {
      all.push_back(accumulator.has_gradient(0)[i] ? accumulator.view(0, i).clone() : at::Tensor());
    }
    return all;
  }

  void expect_same_bits(const Function& function, const at::Tensor& input) {
    const auto whole = gradients(function, input, false);
    const auto split = gradients(function, input, true);
    ASSERT_EQ(split.size(), whole.size());
    for (std::size_t i = 0; i < whole.size(); ++i) {
      ASSERT_EQ(split[i].defined(), whole[i].defined()) << i;
      if (whole[i].defined()) {
        EXPECT_TRUE(split[i].equal(whole[i])) << i;
      }
    }
  }

  static std::map<std::string, int>*& counting() {
    static std::map<std::string, int>* counts = nullptr;
    return counts;
  }
  static void count_operators(const std::function<void()>& work,
                              std::map<std::string, int>& counts) {
    counting() = &counts;
    const auto handle = at::addThreadLocalCallback(
        at::RecordFunctionCallback([](const at::RecordFunction& function)
                                       -> std::unique_ptr<at::ObserverContext> {
          ++(*counting())[function.name()];
          return nullptr;
        }).scopes({at::RecordScope::FUNCTION}));
    work();
    at::removeCallback(handle);
  }

  std::vector<at::Tensor> weights_;
  std::map<std::string, int> input_half_, weight_half_;  // operator -> calls
};

TEST_F(SplitBackwardTest, ALinearLayersHalvesAreOneProductEach) {
  weights_ = {at::randn({5, 4}).requires_grad_(), at::randn({5}).requires_grad_(),
              at::randn({3, 5}).requires_grad_()};
  expect_same_bits(
      [&](const at::Tensor& x) {
        return at::linear(at::linear(x, weights_[0], weights_[1]).tanh(), weights_[2]);
      },
      at::randn({7, 4}));
  EXPECT_EQ(input_half_["aten::mm"], 2);
  EXPECT_EQ(weight_half_["aten::mm"], 2);
  EXPECT_EQ(input_half_["aten::sum"], 0);  // the bias's gradient
  EXPECT_EQ(weight_half_["aten::sum"], 1);
  EXPECT_EQ(weight_half_["aten::tanh_backward"], 0);
}

TEST_F(SplitBackwardTest, ConvolutionsAndEmbeddingsAreDeferred) {
  weights_ = {at::randn({6, 4}).requires_grad_(), at::randn({4, 4, 3}).requires_grad_(),
              at::randn({4}).requires_grad_()};
  const at::Tensor indices = at::randint(0, 6, {2, 9});
  expect_same_bits(
      [&](const at::Tensor& x) {
        const at::Tensor embedded = at::embedding(weights_[0], indices).transpose(1, 2);
        return at::conv1d(embedded * x, weights_[1], weights_[2]);
      },
      at::randn({2, 4, 9}));
  EXPECT_EQ(input_half_["aten::embedding_dense_backward"], 0);
  EXPECT_EQ(weight_half_["aten::embedding_dense_backward"], 1);
  EXPECT_EQ(input_half_["aten::convolution_backward"], 1);
  EXPECT_EQ(weight_half_["aten::convolution_backward"], 1);
}

TEST_F(SplitBackwardTest, OtherWeightsGradientsAreComputedFirstAndHeld) {
  weights_ = {at::randn({4}).requires_grad_(), at::randn({4}).requires_grad_(),
              at::randn({4}).requires_grad_()};
  expect_same_bits(
      [&](const at::Tensor& x) {
        return at::layer_norm(x * weights_[2], {4}, weights_[0], weights_[1]) + weights_[2];
      },
      at::randn({7, 4}));
  EXPECT_EQ(input_half_["aten::native_layer_norm_backward"], 1);
  EXPECT_EQ(weight_half_["aten::native_layer_norm_backward"], 0);
}

TEST_F(SplitBackwardTest, AWeightWithSeveralUsesGetsTheirSum) {
  weights_ = {at::randn({4, 4}).requires_grad_()};
  const auto deep = [&](const at::Tensor& x) {
    const at::Tensor first = at::linear(x, weights_[0]).tanh();
    return at::linear(at::linear(first, weights_[0]).tanh() + first, weights_[0]);
  };
  expect_same_bits(deep, at::randn({7, 4}));
  EXPECT_EQ(input_half_["aten::mm"], 3);
  EXPECT_EQ(weight_half_["aten::mm"], 3);
}

TEST_F(SplitBackwardTest, AWeightThatIsAlsoUsedOtherwiseIsHeld) {
  weights_ = {at::randn({4, 4}).requires_grad_()};
  expect_same_bits(
      [&](const at::Tensor& x) { return at::linear(x, weights_[0]) * weights_[0].sum(); },
      at::randn({7, 4}));
  EXPECT_EQ(input_half_["aten::mm"], 2);
  EXPECT_EQ(weight_half_["aten::mm"], 0);
}

TEST_F(SplitBackwardTest, WhatIsMadeOfAWeightAndAlsoUsedOtherwiseIsHeld) {
  weights_ = {at::randn({4, 4}).requires_grad_()};
  expect_same_bits(
      [&](const at::Tensor& x) {
        const at::Tensor made = weights_[0].tanh();
        return at::linear(x, made) * made.sum();
      },
      at::randn({7, 4}));
}

TEST_F(SplitBackwardTest, WhatStandsBetweenALayerAndItsWeightIsRunLate) {
  weights_ = {at::randn({3, 4}).requires_grad_()};
  const at::Tensor mask = at::randn({3, 4}).gt(0);
  expect_same_bits([&](const at::Tensor& x) { return at::linear(x, (weights_[0] * mask).tanh()); },
                   at::randn({7, 4}));
  EXPECT_EQ(input_half_["aten::tanh_backward"], 0);
  EXPECT_EQ(weight_half_["aten::tanh_backward"], 1);
}

TEST_F(SplitBackwardTest, ALayerWithHooksRunsOnce) {
  weights_ = {at::randn({3, 4}).requires_grad_()};
  int calls = 0;
  expect_same_bits(
      [&](const at::Tensor& x) {
        const at::Tensor output = at::linear(x, weights_[0]);
        output.register_hook([&](const at::Tensor& gradient) {
          ++calls;
          return gradient * 3;
        });
        return output.tanh();
      },
      at::randn({7, 4}));
  EXPECT_EQ(calls, 2);  // one backward whole, one split
}

TEST_F(SplitBackwardTest, WeightsThatAreNotReachedGetNothing) {
  weights_ = {at::randn({3, 4}).requires_grad_(), at::randn({3, 4}).requires_grad_()};
  expect_same_bits(
      [&](const at::Tensor& x) {
        return at::linear(x, weights_[0]) + at::linear(x, weights_[1]).detach();
      },
      at::randn({7, 4}));
}

TEST_F(SplitBackwardTest, AnOutputMayBeAWeightItself) {
  weights_ = {at::randn({4}).requires_grad_()};
  expect_same_bits([&](const at::Tensor&) { return weights_[0]; }, at::randn({7, 4}));
}

TEST_F(SplitBackwardTest, OnlyWhatTheWeightHalfNeedsStaysInMemory) {
  weights_ = {at::randn({3, 4}).requires_grad_()};
  FlatPacking packing(weights_);
  GradAccumulator accumulator(packing, {"w"}, {packing.allocate(packing.dtype())});
  accumulator.attach(0, weights_[0]);
  accumulator.begin_batch(0);
  std::weak_ptr<int> saved_by_product, saved_by_linear;
  const auto tracked = [](const at::Tensor& like, std::weak_ptr<int>& alive) {
    auto token = std::make_shared<int>(0);
    alive = token;
    const at::Tensor copy = like.clone();
    return at::from_blob(
        copy.data_ptr(), copy.sizes(), [copy, token](void*) {}, copy.options());
  };
  SplitBackward halves;
  {
    const at::Tensor received = at::randn({7, 4}).requires_grad_();
    const at::Tensor x = received * tracked(at::randn({7, 4}), saved_by_product);
    const at::Tensor output = at::mm(x, weights_[0].t()) +
                              at::mm(tracked(at::randn({7, 4}), saved_by_linear), weights_[0].t());
    halves.run_input_half({{torch::autograd::impl::gradient_edge(output)}, {output.detach()}});
  }
  EXPECT_TRUE(saved_by_product.expired());
  EXPECT_FALSE(saved_by_linear.expired());
  halves.run_weight_half();
  EXPECT_TRUE(saved_by_linear.expired());
  EXPECT_TRUE(accumulator.has_gradient(0)[0]);
}

}  // namespace
}  // namespace pd2
