#include "engine/weights/fused_optimizer.h"

#include "core/check.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace pd2 {
namespace {

// torch.optim's single-tensor algorithms over separate parameters, in ATen's own operations.
struct StockParameter {
  at::Tensor w, g, momentum_buffer, exp_avg, exp_avg_sq, max_exp_avg_sq;
  std::int64_t step = 0;
};

void stock_sgd_step(StockParameter& p, const kernels::SgdOptions& o) {
  at::Tensor g = o.maximize ? -p.g : p.g;
  if (o.weight_decay != 0) g = g.add(p.w, o.weight_decay);
  if (o.momentum != 0) {
    if (!p.momentum_buffer.defined()) {
      p.momentum_buffer = g.clone();
    } else {
      p.momentum_buffer.mul_(o.momentum).add_(g, 1 - o.dampening);
    }
    g = o.nesterov ? g.add(p.momentum_buffer, o.momentum) : p.momentum_buffer;
  }
  p.w.add_(g, -o.lr);
}

void stock_adam_step(StockParameter& p, const kernels::AdamOptions& o) {
  if (p.step++ == 0) {
    p.exp_avg = at::zeros_like(p.w);
    p.exp_avg_sq = at::zeros_like(p.w);
    p.max_exp_avg_sq = at::zeros_like(p.w);
  }
  at::Tensor g = o.maximize ? -p.g : p.g;
  if (o.weight_decay != 0 && o.decoupled_weight_decay) p.w.mul_(1 - o.lr * o.weight_decay);
  if (o.weight_decay != 0 && !o.decoupled_weight_decay) g = g.add(p.w, o.weight_decay);
  p.exp_avg.lerp_(g, 1 - o.beta1);
  p.exp_avg_sq.mul_(o.beta2).addcmul_(g, g, 1 - o.beta2);
  const double correction1 = 1 - std::pow(o.beta1, static_cast<double>(p.step));
  const double correction2 = 1 - std::pow(o.beta2, static_cast<double>(p.step));
  at::Tensor second = p.exp_avg_sq;
  if (o.amsgrad) second = p.max_exp_avg_sq = at::maximum(p.max_exp_avg_sq, second);
  const at::Tensor denominator = (second.sqrt() / std::sqrt(correction2)).add_(o.eps);
  p.w.addcdiv_(p.exp_avg, denominator, -o.lr / correction1);
}

// Parameters of awkward sizes side by side in flat buffers, and the stock parameters beside them.
class FlatModel {
 public:
  explicit FlatModel(at::ScalarType dtype,
                     std::vector<std::int64_t> sizes = {1, 16, 37, 5, 130, 64},
                     std::vector<int> groups = {0, 0, 1, 1, 0, 0}) {
    at::manual_seed(7);
    const std::int64_t line = 64 / static_cast<std::int64_t>(at::elementSize(dtype));
    std::int64_t offset = 0;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      slices.push_back({offset, sizes[i], groups.at(i)});
      offset += (sizes[i] + line - 1) / line * line;
    }
    w = at::zeros({offset}, dtype);
    w_out = at::zeros_like(w);
    g = at::zeros_like(w);
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      part(w, i).normal_();
      part(w_out, i).fill_(std::nan(""));
      stock.push_back({});
      stock[i].w = part(w, i).clone();
    }
  }

  at::Tensor part(const at::Tensor& flat, std::size_t i) const {
    return flat.narrow(0, slices[i].offset, slices[i].numel);
  }

  void new_gradients() {
    for (std::size_t i = 0; i < slices.size(); ++i) {
      part(g, i).normal_();
      stock[i].g = part(g, i).clone();
    }
  }

  void publish() { std::swap(w, w_out); }

  bool padding_is_zero(const at::Tensor& flat) const {
    at::Tensor rest = flat.clone();
    for (std::size_t i = 0; i < slices.size(); ++i) part(rest, i).zero_();
    return rest.eq(0).all().item<bool>();
  }

  std::vector<bool> all() const { return std::vector<bool>(slices.size(), true); }

  std::vector<ParameterSlice> slices;
  at::Tensor w, w_out, g;
  std::vector<StockParameter> stock;
};

double relative_distance(const at::Tensor& actual, const at::Tensor& expected) {
  return ((actual - expected).norm() / expected.norm()).item<double>();
}

GroupOptions group(const kernels::SgdOptions& sgd) { return {sgd, {}}; }
GroupOptions group(const kernels::AdamOptions& adam) { return {{}, adam}; }

using Sgd = kernels::SgdOptions;
using Adam = kernels::AdamOptions;

std::vector<std::vector<GroupOptions>> sgd_groups() {
  return {
      {group(Sgd{.lr = 0.1}), group(Sgd{.lr = 0.2, .weight_decay = 0.1})},
      {group(Sgd{.lr = 0.1, .momentum = 0.9}), group(Sgd{.lr = 0.2, .maximize = true})},
      {group(Sgd{.lr = 0.1, .momentum = 0.9, .dampening = 0.2, .weight_decay = 0.1}),
       group(Sgd{.lr = 0.02, .momentum = 0.8, .nesterov = true, .maximize = true})},
  };
}

std::vector<std::vector<GroupOptions>> adam_groups() {
  return {
      {group(Adam{.lr = 0.01}), group(Adam{.lr = 0.02, .weight_decay = 0.1})},
      {group(Adam{.lr = 0.01, .weight_decay = 0.1, .decoupled_weight_decay = true}),
       group(Adam{.lr = 0.01, .beta1 = 0.4, .beta2 = 0.9, .eps = 1e-4, .maximize = true})},
      {group(Adam{.lr = 0.01, .weight_decay = 0.1, .amsgrad = true}), group(Adam{.lr = 0.01})},
  };
}

class FusedOptimizerOfDtype : public ::testing::TestWithParam<at::ScalarType> {};
INSTANTIATE_TEST_SUITE_P(EveryDtype, FusedOptimizerOfDtype,
                         ::testing::Values(at::kFloat, at::kDouble),
                         [](const auto& info) { return std::string(at::toString(info.param)); });

TEST_P(FusedOptimizerOfDtype, SgdEqualsStockBitForBit) {
  for (const auto& groups : sgd_groups()) {
    FlatModel model(GetParam());
    FusedOptimizer optimizer(OptimizerKind::kSgd, model.slices, model.w);
    for (int t = 0; t < 5; ++t) {
      model.new_gradients();
      optimizer.step(model.w, model.g, model.w_out, groups, model.all());
      model.publish();
      for (std::size_t i = 0; i < model.slices.size(); ++i) {
        stock_sgd_step(model.stock[i], groups[model.slices[i].group].sgd);
        EXPECT_TRUE(at::equal(model.part(model.w, i), model.stock[i].w)) << "parameter " << i;
      }
    }
  }
}

TEST_P(FusedOptimizerOfDtype, AdamEqualsStockWithinAMillionthOfTheNorm) {
  for (const auto& groups : adam_groups()) {
    FlatModel model(GetParam());
    FusedOptimizer optimizer(OptimizerKind::kAdam, model.slices, model.w);
    for (int t = 0; t < 20; ++t) {
      model.new_gradients();
      optimizer.step(model.w, model.g, model.w_out, groups, model.all());
      model.publish();
      for (std::size_t i = 0; i < model.slices.size(); ++i) {
        stock_adam_step(model.stock[i], groups[model.slices[i].group].adam);
      }
    }
    for (std::size_t i = 0; i < model.slices.size(); ++i) {
      const StockParameter& stock = model.stock[i];
      EXPECT_LT(relative_distance(model.part(model.w, i), stock.w), 1e-6);
      EXPECT_LT(relative_distance(model.part(optimizer.state("exp_avg"), i), stock.exp_avg), 1e-6);
      EXPECT_LT(relative_distance(model.part(optimizer.state("exp_avg_sq"), i), stock.exp_avg_sq),
                1e-6);
    }
  }
}

TEST(FusedOptimizer, ParameterWithoutGradientIsCopiedAndKeepsItsStateAndStepCount) {
  for (OptimizerKind kind : {OptimizerKind::kSgd, OptimizerKind::kAdam}) {
    const std::vector<GroupOptions> groups(2, group(Sgd{.lr = 0.1, .momentum = 0.9}));
    FlatModel model(at::kFloat);
    FusedOptimizer optimizer(kind, model.slices, model.w);
    const char* name = kind == OptimizerKind::kSgd ? "momentum_buffer" : "exp_avg";
    for (int t = 0; t < 6; ++t) {
      model.new_gradients();
      std::vector<bool> has_gradient = model.all();
      has_gradient[2] = t >= 2;
      has_gradient[3] = t % 2 == 0;
      const at::Tensor before =
          optimizer.state(name).defined() ? optimizer.state(name).clone() : at::zeros_like(model.w);
      optimizer.step(model.w, model.g, model.w_out, groups, has_gradient);
      for (std::size_t i : {2, 3}) {
        if (has_gradient[i]) continue;
        EXPECT_TRUE(at::equal(model.part(model.w_out, i), model.part(model.w, i)));
        EXPECT_TRUE(at::equal(model.part(optimizer.state(name), i), model.part(before, i)));
      }
      model.publish();
      for (std::size_t i = 0; i < model.slices.size(); ++i) {
        StockParameter& stock = model.stock[i];
        if (has_gradient[i] && kind == OptimizerKind::kSgd) stock_sgd_step(stock, groups[0].sgd);
        if (has_gradient[i] && kind == OptimizerKind::kAdam) stock_adam_step(stock, groups[0].adam);
        EXPECT_LT(relative_distance(model.part(model.w, i), stock.w), 1e-6);
      }
    }
    EXPECT_EQ(optimizer.step_count(0), 6);
    EXPECT_EQ(optimizer.step_count(2), 4);
    EXPECT_EQ(optimizer.step_count(3), 3);
  }
}

TEST(FusedOptimizer, MomentumSwitchedOnLaterBeginsWithThatGradient) {
  FlatModel model(at::kFloat);
  FusedOptimizer optimizer(OptimizerKind::kSgd, model.slices, model.w);
  for (int t = 0; t < 5; ++t) {
    std::vector<GroupOptions> groups(2, group(Sgd{.lr = 0.1, .dampening = 0.5}));
    if (t >= 1) groups[0].sgd.momentum = 0.9;
    if (t >= 3) groups[1].sgd.momentum = 0.9;
    model.new_gradients();
    optimizer.step(model.w, model.g, model.w_out, groups, model.all());
    model.publish();
    for (std::size_t i = 0; i < model.slices.size(); ++i) {
      stock_sgd_step(model.stock[i], groups[model.slices[i].group].sgd);
      EXPECT_TRUE(at::equal(model.part(model.w, i), model.stock[i].w)) << "parameter " << i;
    }
  }
}

TEST(FusedOptimizer, MayWriteOverTheWeightsOrTheGradient) {
  FlatModel apart(at::kFloat), over_weights(at::kFloat), over_gradient(at::kFloat);
  over_weights.w_out = over_weights.w;
  over_gradient.w_out = over_gradient.g;
  for (FlatModel* model : {&apart, &over_weights, &over_gradient}) {
    at::manual_seed(3);
    model->new_gradients();
    FusedOptimizer optimizer(OptimizerKind::kAdam, model->slices, model->w);
    std::vector<bool> has_gradient = model->all();
    has_gradient[1] = false;
    optimizer.step(model->w, model->g, model->w_out, adam_groups()[0], has_gradient);
  }
  EXPECT_TRUE(at::equal(over_weights.w_out, apart.w_out));
  EXPECT_TRUE(at::equal(over_gradient.w_out, apart.w_out));
}

TEST(FusedOptimizer, PaddingStaysZeroInWeightsAndState) {
  for (double eps : {1e-8, 0.0}) {
    GroupOptions options;
    options.sgd = {.lr = 0.1, .momentum = 0.9, .weight_decay = 0.1, .maximize = true};
    options.adam = {.eps = eps, .weight_decay = 0.1, .amsgrad = true, .maximize = true};
    const std::vector<GroupOptions> groups(2, options);
    for (OptimizerKind kind : {OptimizerKind::kSgd, OptimizerKind::kAdam}) {
      FlatModel model(at::kFloat);
      FusedOptimizer optimizer(kind, model.slices, model.w);
      for (int t = 0; t < 3; ++t) {
        model.new_gradients();
        optimizer.step(model.w, model.g, model.w_out, groups, model.all());
        model.publish();
        EXPECT_TRUE(model.padding_is_zero(model.w));
      }
      const bool sgd = kind == OptimizerKind::kSgd;
      for (const char* name :
           {sgd ? "momentum_buffer" : "exp_avg", sgd ? "momentum_buffer" : "max_exp_avg_sq"}) {
        EXPECT_TRUE(model.padding_is_zero(optimizer.state(name)));
      }
    }
  }
}

TEST(FusedOptimizer, ElementsOutsideAllSlicesAreLeftAlone) {
  FlatModel model(at::kFloat, {20, 16, 20}, {0, 0, 0});
  const ParameterSlice foreign = model.slices[1];
  model.slices.erase(model.slices.begin() + 1);
  FusedOptimizer optimizer(OptimizerKind::kSgd, model.slices, model.w);
  optimizer.step(model.w, model.g, model.w_out, sgd_groups()[0], model.all());
  const at::Tensor untouched = model.w_out.narrow(0, foreign.offset, foreign.numel);
  EXPECT_TRUE(untouched.isnan().all().item<bool>());
}

TEST(FusedOptimizer, StateLeavesOutWhatLiesBetweenTheSlices) {
  // Two optimizers over every second parameter each step as one over all does.
  FlatModel model(at::kFloat, {20, 16, 7, 40, 33}, {0, 1, 0, 1, 0});
  FlatModel apart(at::kFloat, {20, 16, 7, 40, 33}, {0, 1, 0, 1, 0});
  FusedOptimizer together(OptimizerKind::kAdam, model.slices, model.w);
  std::vector<ParameterSlice> even, odd;
  for (const ParameterSlice& slice : model.slices) (slice.group == 0 ? even : odd).push_back(slice);
  FusedOptimizer first(OptimizerKind::kAdam, even, apart.w);
  FusedOptimizer second(OptimizerKind::kAdam, odd, apart.w);
  for (int t = 0; t < 3; ++t) {
    model.new_gradients();
    apart.g.copy_(model.g);
    const std::vector<GroupOptions> groups = adam_groups()[1];
    together.step(model.w, model.g, model.w_out, groups, model.all());
    first.step(apart.w, apart.g, apart.w_out, groups, {true, true, true});
    second.step(apart.w, apart.g, apart.w_out, groups, {true, true});
    for (std::size_t i = 0; i < model.slices.size(); ++i) {
      EXPECT_TRUE(at::equal(model.part(model.w_out, i), apart.part(apart.w_out, i)));
    }
    model.publish();
    apart.publish();
  }
  EXPECT_EQ(first.state("exp_avg").numel(), 32 + 16 + 48);
  EXPECT_EQ(second.state("exp_avg").numel(), 16 + 48);
  EXPECT_EQ(second.state_offset(1), 16);
  EXPECT_EQ(first.state_bytes().used + second.state_bytes().used, together.state_bytes().used);
  EXPECT_EQ(second.state_bytes().padding, 2 * 4 * 8);
  const at::Tensor mine = second.state("exp_avg").narrow(0, second.state_offset(1), 40);
  EXPECT_TRUE(at::equal(mine, model.part(together.state("exp_avg"), 3)));
}

TEST(FusedOptimizer, NumberOfThreadsChangesNoBit) {
  const int threads = at::get_num_threads();
  std::vector<at::Tensor> results;
  for (int num_threads : {1, 3}) {
    at::set_num_threads(num_threads);
    FlatModel model(at::kFloat, {300'001, 7, 1, 500'000, 12'345, 900'000});
    FusedOptimizer optimizer(OptimizerKind::kAdam, model.slices, model.w);
    for (int t = 0; t < 2; ++t) {
      model.new_gradients();
      optimizer.step(model.w, model.g, model.w_out, adam_groups()[0], model.all());
      model.publish();
    }
    results.push_back(model.w);
  }
  at::set_num_threads(threads);
  EXPECT_TRUE(at::equal(results[0], results[1]));
}

TEST(FusedOptimizer, StateThatIsSavedAndLoadedContinuesBitForBit) {
  for (OptimizerKind kind : {OptimizerKind::kSgd, OptimizerKind::kAdam}) {
    const bool sgd = kind == OptimizerKind::kSgd;
    const auto groups = sgd ? sgd_groups()[2] : adam_groups()[2];
    FlatModel model(at::kFloat);
    FusedOptimizer optimizer(kind, model.slices, model.w);
    for (int t = 0; t < 3; ++t) {
      model.new_gradients();
      optimizer.step(model.w, model.g, model.w_out, groups, model.all());
      model.publish();
    }
    FusedOptimizer loaded(kind, model.slices, model.w);
    using Names = std::vector<const char*>;
    for (const char* name :
         sgd ? Names{"momentum_buffer"} : Names{"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}) {
      loaded.state_or_zeros(name).copy_(optimizer.state(name));
    }
    for (std::size_t i = 0; i < model.slices.size(); ++i) {
      loaded.set_step_count(i, optimizer.step_count(i));
      loaded.mark_loaded(i);
    }
    EXPECT_EQ(loaded.state_bytes().used, optimizer.state_bytes().used);
    model.new_gradients();
    const at::Tensor continued = at::zeros_like(model.w);
    optimizer.step(model.w, model.g, model.w_out, groups, model.all());
    loaded.step(model.w, model.g, continued, groups, model.all());
    EXPECT_TRUE(at::equal(continued, model.w_out));
  }
}

TEST(FusedOptimizer, StepCountZeroForgetsTheMomentum) {
  FlatModel model(at::kFloat);
  model.new_gradients();
  FusedOptimizer optimizer(OptimizerKind::kSgd, model.slices, model.w);
  optimizer.state_or_zeros("momentum_buffer").fill_(100);
  optimizer.step(model.w, model.g, model.w_out, sgd_groups()[2], model.all());
  stock_sgd_step(model.stock[0], sgd_groups()[2][0].sgd);
  EXPECT_TRUE(at::equal(model.part(model.w_out, 0), model.stock[0].w));
}

TEST(FusedOptimizer, StateBytesCountParametersOnly) {
  FlatModel model(at::kFloat);
  const std::int64_t weight_bytes = 4 * (1 + 16 + 37 + 5 + 130 + 64);
  model.new_gradients();
  const auto bytes_after_a_step = [&](OptimizerKind kind, const std::vector<GroupOptions>& groups) {
    FusedOptimizer optimizer(kind, model.slices, model.w);
    EXPECT_EQ(optimizer.state_bytes().used, 0);
    optimizer.step(model.w, model.g, model.w_out, groups, model.all());
    return optimizer.state_bytes().used;
  };
  EXPECT_EQ(bytes_after_a_step(OptimizerKind::kSgd, sgd_groups()[0]), 0);
  EXPECT_EQ(bytes_after_a_step(OptimizerKind::kSgd, sgd_groups()[1]), weight_bytes);
  EXPECT_EQ(bytes_after_a_step(OptimizerKind::kAdam, adam_groups()[0]), 2 * weight_bytes);
  EXPECT_EQ(bytes_after_a_step(OptimizerKind::kAdam, adam_groups()[2]), 3 * weight_bytes);
}

// Backward passes in flight have saved views of these buffers; the weight store, not autograd,
// guards them.
TEST(FusedOptimizer, DoesNotCountAsAChangeForAutograd) {
  FlatModel model(at::kFloat);
  FusedOptimizer optimizer(OptimizerKind::kSgd, model.slices, model.w);
  const auto version = model.w_out._version();
  std::vector<bool> has_gradient = model.all();
  has_gradient[0] = false;
  optimizer.step(model.w, model.g, model.w_out, sgd_groups()[1], has_gradient);
  EXPECT_EQ(model.w_out._version(), version);
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const ValueError& error) {
    return error.what();
  }
  return "no ValueError";
}

TEST(FusedOptimizer, ErrorsStateTheRuleAndBothValues) {
  const at::Tensor flat = at::zeros({64});
  const auto make = [&](std::vector<ParameterSlice> slices, const at::Tensor& example) {
    return error_of([&] { FusedOptimizer(OptimizerKind::kSgd, std::move(slices), example); });
  };
  EXPECT_EQ(make({{0, 17, 0}, {16, 4, 0}}, flat),
            "slice 1: elements 16 to 20: slices must be in order, without overlap, from 17 to 64");
  EXPECT_EQ(make({{48, 17, 0}}, flat),
            "slice 0: elements 48 to 65: slices must be in order, without overlap, from 0 to 64");
  EXPECT_EQ(make({{8, 4, 0}}, flat),
            "slice 0: offset 8: must be a multiple of 64 bytes, 16 elements");
  EXPECT_NE(make({}, at::zeros({4}, at::kHalf)).find("Half on cpu"), std::string::npos);

  FusedOptimizer optimizer(OptimizerKind::kSgd, {{0, 64, 1}}, flat);
  const at::Tensor out = at::zeros({64});
  const std::vector<GroupOptions> groups(2);
  const auto step = [&](const at::Tensor& gradient, std::size_t num_groups, std::size_t flags) {
    return error_of([&] {
      optimizer.step(flat, gradient, out, std::span(groups).first(num_groups),
                     std::vector<bool>(flags, true));
    });
  };
  EXPECT_EQ(step(flat, 2, 3), "has_gradient: 3 entries, parameters: 1: must be equal");
  EXPECT_EQ(step(flat, 1, 1),
            "group 1 of a parameter, groups given: 1: there must be options for it");
  EXPECT_EQ(step(at::zeros({63}), 2, 1),
            "gradient: must be contiguous with at least 64 elements of Float on cpu, is "
            "CPUFloatType with 63");
  const at::Tensor narrow = at::zeros({64}, at::kBFloat16), half = at::zeros({64}, at::kHalf);
  FusedOptimizer of_narrow(OptimizerKind::kSgd, {{0, 64, 1}}, narrow);
  EXPECT_EQ(error_of([&] { of_narrow.step(narrow, narrow, narrow, groups, {true}); }),
            "gradient: BFloat16: without a master it must be float32 or float64");
  EXPECT_EQ(error_of([&] { of_narrow.step(half, narrow, half, groups, {true}, flat); }),
            "gradient: BFloat16: with a master of Half weights it must be float32");
  EXPECT_EQ(error_of([&] { optimizer.state("exp_avg"); }),
            "optimizer state \"exp_avg\": SGD has momentum_buffer");
}

}  // namespace
}  // namespace pd2
