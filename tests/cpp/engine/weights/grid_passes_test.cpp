// The passes of devices whose kernels are grids of threads, registered for the CPU, whose memory
// the kernels' bodies can read: the optimizer must not notice.
#include "engine/weights/grid_passes.h"

#include "checked_device/host_grid.h"
#include "core/check.h"
#include "engine/by_device_type.h"
#include "engine/weights/fused_optimizer.h"
#include "engine/weights/tensor_norms.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <vector>

namespace pd2 {
namespace {

int steps_launched = 0, norms_launched = 0;

GridDevice host_grid() {
  static constexpr kernels::GridKernels kKernels{[](const kernels::StepLaunch& launch, void*) {
                                                   ++steps_launched;
                                                   kernels::step_on_host(launch, launch.num_chunks);
                                                 },
                                                 [](const kernels::NormLaunch& launch, void*) {
                                                   ++norms_launched;
                                                   kernels::norms_on_host(launch,
                                                                          launch.num_chunks);
                                                 }};
  return {kKernels, nullptr, /*pins_memory=*/false};
}

class GridPasses : public ::testing::Test {
 protected:
  void SetUp() override {
    steps_launched = norms_launched = 0;
    by_device_type<DevicePasses>().set(
        at::kCPU,
        {[](const FlatStep& step, at::Tensor& table) { upload_on_grid(step, table, host_grid()); },
         [](const FlatStep& step, const at::Tensor& table) {
           step_on_grid(step, table, host_grid());
         },
         [](const std::vector<at::Tensor>& tensors, double type) {
           return norms_on_grid(tensors, type, host_grid());
         }});
  }
  void TearDown() override { by_device_type<DevicePasses>().set(at::kCPU, cpu_passes()); }
};

const std::vector<ParameterSlice> kSlices{
    {0, 1, 0}, {32, 37, 1}, {96, 5000, 0}, {5120, 64, 1}, {5184, 3, 0}};
constexpr std::int64_t kNumel = 5216;

std::vector<GroupOptions> groups(double lr) {
  return {{.sgd = {.lr = lr, .momentum = 0.9, .weight_decay = 0.1},
           .adam = {.lr = lr, .weight_decay = 0.1, .decoupled_weight_decay = true}},
          {.sgd = {.lr = lr}, .adam = {.lr = lr, .amsgrad = true}}};
}

struct Trained {
  at::Tensor w, master;
  std::vector<at::Tensor> states;
};

// Three steps, in which not all parameters have a gradient and the gradients are scaled.
Trained train(OptimizerKind kind, at::ScalarType dtype, at::ScalarType master_dtype,
              at::ScalarType of_gradients) {
  at::manual_seed(5);
  const bool is_plain = master_dtype == dtype;
  at::Tensor w = at::zeros({kNumel}, dtype), w_out = at::zeros_like(w), master;
  const at::Tensor g = at::zeros({kNumel}, of_gradients);
  for (const ParameterSlice& slice : kSlices) w.narrow(0, slice.offset, slice.numel).normal_();
  if (!is_plain) master = w.to(at::kFloat).to(master_dtype);
  FusedOptimizer optimizer(kind, kSlices, g);
  for (int step = 0; step < 3; ++step) {
    for (const ParameterSlice& slice : kSlices) g.narrow(0, slice.offset, slice.numel).normal_();
    std::vector<bool> has_gradient(kSlices.size(), true);
    has_gradient[step] = false;
    optimizer.step(w, g, w_out, groups(0.1 / (step + 1)), has_gradient, master,
                   step == 0 ? at::Tensor() : at::scalar_tensor(0.3 * step, at::kDouble));
    std::swap(w, w_out);
  }
  std::vector<at::Tensor> states;
  for (const char* name : {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}) {
    if (kind == OptimizerKind::kAdam) states.push_back(optimizer.state(name));
  }
  if (kind == OptimizerKind::kSgd) states.push_back(optimizer.state("momentum_buffer"));
  return {w, master, states};
}

TEST_F(GridPasses, StepToTheBitsOfTheCpusPassesWithOneLaunchEach) {
  for (const OptimizerKind kind : {OptimizerKind::kSgd, OptimizerKind::kAdam}) {
    for (const auto& [dtype, master, of_gradients] :
         std::vector<std::array<at::ScalarType, 3>>{{at::kFloat, at::kFloat, at::kFloat},
                                                    {at::kDouble, at::kDouble, at::kDouble},
                                                    {at::kBFloat16, at::kFloat, at::kFloat},
                                                    {at::kHalf, at::kFloat, at::kFloat},
                                                    {at::kBFloat16, at::kShort, at::kFloat},
                                                    {at::kBFloat16, at::kFloat, at::kBFloat16},
                                                    {at::kBFloat16, at::kShort, at::kBFloat16}}) {
      SetUp();
      const Trained actual = train(kind, dtype, master, of_gradients);
      EXPECT_EQ(steps_launched, 3);
      TearDown();
      const Trained expected = train(kind, dtype, master, of_gradients);
      EXPECT_EQ(steps_launched, 3);
      EXPECT_TRUE(actual.w.equal(expected.w)) << dtype;
      EXPECT_TRUE(!actual.master.defined() || actual.master.equal(expected.master)) << dtype;
      ASSERT_EQ(actual.states.size(), expected.states.size());
      for (std::size_t i = 0; i < expected.states.size(); ++i) {
        EXPECT_TRUE(actual.states[i].equal(expected.states[i])) << dtype << " state " << i;
      }
    }
  }
}

TEST_F(GridPasses, RepeatARecordedLaunchWithWhatIsUploadedNext) {
  const at::Tensor w = at::ones({1000}), g = at::ones({1000}), w_out = at::zeros({1000});
  std::vector<kernels::StepOfRun> runs{{0, 1000, 0, kernels::SgdOptions{.lr = 0.5}}};
  FlatStep step{.arrays = {.rule = OptimizerKind::kSgd,
                           .kind = kernels::WeightsKind::kFloat,
                           .w = w.const_data_ptr(),
                           .w_out = w_out.mutable_data_ptr(),
                           .master = nullptr,
                           .g = g.const_data_ptr(),
                           .state = {},
                           .table = nullptr,
                           .num_chunks = 0},
                .gradient = g.mutable_data_ptr(),
                .gradient_scale = 1,
                .runs = runs,
                .device = at::kCPU};
  at::Tensor table;
  upload_on_grid(step, table, host_grid());
  step_on_grid(step, table, host_grid());
  EXPECT_TRUE(w_out.eq(0.5).all().item<bool>());
  const void* const place = table.const_data_ptr();
  FlatStep next = step;
  std::vector<kernels::StepOfRun> next_runs{{0, 1000, 0, kernels::SgdOptions{.lr = 0.25}}};
  next.runs = next_runs;
  next.gradient_scale = 2;
  upload_on_grid(next, table, host_grid());
  EXPECT_EQ(table.const_data_ptr(), place);
  next_runs[0].options = kernels::SgdOptions{.lr = 0.125};  // not uploaded: not read
  step_on_grid(step, table, host_grid());
  EXPECT_TRUE(w_out.eq(0.5).all().item<bool>());
  upload_on_grid(next, table, host_grid());
  step_on_grid(step, table, host_grid());
  EXPECT_TRUE(w_out.eq(0.75).all().item<bool>());
  next.factor = at::full({}, 4, at::kFloat);  // instead of the number
  upload_on_grid(next, table, host_grid());
  step_on_grid(step, table, host_grid());
  EXPECT_TRUE(w_out.eq(0.5).all().item<bool>());
}

TEST_F(GridPasses, NormsOfAllTensorsComeFromOneLaunchPerDtype) {
  at::manual_seed(6);
  const std::vector<at::Tensor> tensors{
      at::randn({1000}),
      at::randn({3}, at::kDouble),
      at::randn({0}),
      at::randn({40'000}),
      at::randn({30'001}).to(at::kBFloat16),
      at::randn({2, 3, 4, 4}).contiguous(at::MemoryFormat::ChannelsLast)};
  for (const double type : {1.0, 2.0, static_cast<double>(INFINITY), 3.0}) {
    norms_launched = 0;
    const at::Tensor all = norms_of(tensors, type);
    EXPECT_EQ(norms_launched, type == 3 ? 0 : 3);
    ASSERT_EQ(all.numel(), std::ssize(tensors));
    const auto* norms = all.const_data_ptr<double>();
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      if (tensors[i].numel() == 0) continue;
      const auto expected = at::linalg_vector_norm(tensors[i].to(at::kDouble), type).item<double>();
      EXPECT_NEAR(norms[i], expected, (type == 3 ? 1e-5 : 1e-6) * expected) << type;
    }
  }
}

TEST(NormsOf, AreTorchsBitForBitOnTheCpu) {
  at::manual_seed(7);
  const std::vector<at::Tensor> tensors{at::randn({1000}), at::randn({777}, at::kDouble),
                                        at::randn({40'000})};
  for (const double type : {1.0, 2.0, static_cast<double>(INFINITY), 3.0}) {
    const at::Tensor all = norms_of(tensors, type);
    const auto* norms = all.const_data_ptr<double>();
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      EXPECT_EQ(norms[i], at::linalg_vector_norm(tensors[i], type).item<double>());
    }
    const at::Tensor narrow = tensors[2].to(at::kBFloat16);
    EXPECT_EQ(norms_of({narrow}, type).item<double>(),
              at::linalg_vector_norm(narrow.to(at::kFloat), type).item<double>());
  }
}

TEST(DevicePassesOf, ADeviceThatHasNone) {
  EXPECT_EQ(by_device_type<DevicePasses>().find(at::kMeta), nullptr);
  EXPECT_THROW(FusedOptimizer(OptimizerKind::kSgd, {}, at::empty({8}, at::kMeta)), ValueError);
}

}  // namespace
}  // namespace pd2
