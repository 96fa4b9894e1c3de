#include "engine/weights/fused_optimizer.h"

#include "core/check.h"

#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <array>
#include <utility>

namespace pd2 {
namespace {

constexpr std::array<std::string_view, 1> kSgdStates{"momentum_buffer"};
constexpr std::array<std::string_view, 3> kAdamStates{"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};

std::span<const std::string_view> state_names(OptimizerKind kind) {
  if (kind == OptimizerKind::kSgd) return kSgdStates;
  return kAdamStates;
}

kernels::WeightsKind weights_kind(const at::Tensor& w, const at::Tensor& master) {
  if (!master.defined()) {
    return w.scalar_type() == at::kDouble ? kernels::WeightsKind::kDouble
                                          : kernels::WeightsKind::kFloat;
  }
  if (master.scalar_type() == at::kShort) return kernels::WeightsKind::kSplit;
  return w.scalar_type() == at::kBFloat16 ? kernels::WeightsKind::kBfloat16Master
                                          : kernels::WeightsKind::kFloat16Master;
}

}  // namespace

OptimizerKind parse_optimizer(std::string_view kind) {
  PD2_CHECK(kind == "sgd" || kind == "adam", "fused optimizer: ", kind, ", known: sgd, adam");
  return kind == "sgd" ? OptimizerKind::kSgd : OptimizerKind::kAdam;
}

FusedOptimizer::FusedOptimizer(OptimizerKind kind, std::vector<ParameterSlice> slices,
                               const at::Tensor& flat_example)
    : kind_(kind),
      slices_(std::move(slices)),
      numel_(flat_example.numel()),
      gradient_dtype_(flat_example.scalar_type()),
      options_(flat_example.options().requires_grad(false).dtype(
          gradient_dtype_ == at::kBFloat16 ? at::kFloat : gradient_dtype_)),
      passes_(by_device_type<DevicePasses>().find(flat_example.device().type())),
      step_counts_(slices_.size(), 0),
      has_momentum_(slices_.size(), false),
      has_kept_(slices_.size(), false) {
  PD2_CHECK(
      passes_ != nullptr && (options_.dtype() == at::kFloat || options_.dtype() == at::kDouble),
      "flat buffer: ", gradient_dtype_, " on ", flat_example.device(),
      ": the fused optimizer needs float32, float64 or bfloat16 on a device it was built for");
  const std::int64_t line = alignment_bytes(flat_example.device()) / flat_example.element_size();
  std::int64_t end = 0;
  for (std::size_t i = 0; i < slices_.size(); ++i) {
    const ParameterSlice& slice = slices_[i];
    PD2_CHECK(slice.offset >= end && slice.numel >= 0 && slice.offset + slice.numel <= numel_,
              "slice ", i, ": elements ", slice.offset, " to ", slice.offset + slice.numel,
              ": slices must be in order, without overlap, from ", end, " to ", numel_);
    PD2_CHECK(slice.offset % line == 0, "slice ", i, ": offset ", slice.offset,
              ": must be a multiple of ", line * flat_example.element_size(), " bytes, ", line,
              " elements");
    PD2_CHECK(slice.group >= 0, "slice ", i, ": group ", slice.group, ": must be at least 0");
    end = slice.offset + slice.numel;
    state_offsets_.push_back(state_numel_);
    state_numel_ += (slice.numel + line - 1) / line * line;
  }
  for (std::string_view name : state_names(kind_)) states_.push_back({name, at::Tensor()});
}

void FusedOptimizer::step(const at::Tensor& w, const at::Tensor& gradient, const at::Tensor& w_out,
                          std::span<const GroupOptions> groups,
                          const std::vector<bool>& has_gradient, const at::Tensor& master,
                          const at::Tensor& factor) {
  check_arguments(w, gradient, w_out, groups, has_gradient, master);
  const bool keeps_steps = !master.defined() || master.scalar_type() == at::kShort;
  allocate_state(groups, has_gradient, keeps_steps);

  const bool is_known = factor.defined() && factor.is_cpu();
  // Raw pointers: views of these buffers are saved by backward passes in flight, and writing
  // through ATen would count as a change of theirs. The engine guards versions by itself.
  const std::vector<kernels::StepOfRun> runs = this->runs(groups, has_gradient);
  FlatStep step{.arrays = {.rule = kind_,
                           .kind = weights_kind(w, master),
                           .w = w.const_data_ptr(),
                           .w_out = w_out.mutable_data_ptr(),
                           .master = master.defined() ? master.mutable_data_ptr() : nullptr,
                           .g = gradient.const_data_ptr(),
                           .has_bfloat16_gradients = gradient_dtype_ == at::kBFloat16,
                           .state = {},
                           .is_fed = std::ranges::any_of(
                               runs, [](const auto& run) { return run.feedback.has_value(); }),
                           .kept = kept_.defined() ? kept_.mutable_data_ptr() : nullptr,
                           .table = nullptr,
                           .num_chunks = 0},
                .gradient = gradient.mutable_data_ptr(),
                .gradient_scale = is_known ? factor.item<double>() : 1,
                .factor = is_known ? at::Tensor() : factor,
                .runs = runs,
                .device = w.device()};
  for (std::size_t i = 0; i < states_.size(); ++i) {
    if (states_[i].flat.defined()) step.arrays.state[i] = states_[i].flat.mutable_data_ptr();
  }
  const c10::DeviceGuard guard(w.device());
  passes_->upload(step, table_);
  passes_->step(step, table_);

  for (std::size_t i = 0; i < slices_.size(); ++i) {
    has_kept_[i] =
        keeps_steps && has_gradient[i] && groups[slices_[i].group].feedback_coefficient != 0.0;
    if (!has_gradient[i]) continue;
    ++step_counts_[i];
    if (groups[slices_[i].group].sgd.momentum != 0.0) has_momentum_[i] = true;
  }
}

void FusedOptimizer::check_arguments(const at::Tensor& w, const at::Tensor& gradient,
                                     const at::Tensor& w_out, std::span<const GroupOptions> groups,
                                     const std::vector<bool>& has_gradient,
                                     const at::Tensor& master) const {
  const auto check = [&](const char* name, const at::Tensor& tensor, at::ScalarType expected) {
    PD2_CHECK(tensor.defined() && tensor.is_contiguous() && tensor.numel() >= numel_ &&
                  tensor.scalar_type() == expected && tensor.device() == options_.device(),
              name, ": must be contiguous with at least ", numel_, " elements of ", expected,
              " on ", options_.device(), ", is ",
              tensor.defined() ? tensor.toString() : "undefined", " with ",
              tensor.defined() ? tensor.numel() : 0);
  };
  check("gradient", gradient, gradient_dtype_);
  if (master.defined()) {
    const bool is_split = master.scalar_type() == at::kShort;
    const at::ScalarType half =
        w.defined() && w.scalar_type() == at::kHalf && !is_split ? at::kHalf : at::kBFloat16;
    check("master", master, is_split ? at::kShort : at::kFloat);
    check("w", w, half);
    check("w_out", w_out, half);
    PD2_CHECK(gradient_dtype_ == half || gradient_dtype_ == at::kFloat,
              "gradient: ", gradient_dtype_, ": with a master of ", half,
              " weights it must be float32", half == at::kBFloat16 ? " or bfloat16" : "");
  } else {
    check("w", w, gradient_dtype_);
    check("w_out", w_out, gradient_dtype_);
    PD2_CHECK(gradient_dtype_ != at::kBFloat16, "gradient: ", gradient_dtype_,
              ": without a master it must be float32 or float64");
  }
  PD2_CHECK(has_gradient.size() == slices_.size(), "has_gradient: ", has_gradient.size(),
            " entries, parameters: ", slices_.size(), ": must be equal");
  for (const ParameterSlice& slice : slices_) {
    PD2_CHECK(slice.group < static_cast<std::int64_t>(groups.size()), "group ", slice.group,
              " of a parameter, groups given: ", groups.size(), ": there must be options for it");
  }
}

void FusedOptimizer::allocate_state(std::span<const GroupOptions> groups,
                                    const std::vector<bool>& has_gradient, bool keeps_steps) {
  for (std::size_t i = 0; i < slices_.size(); ++i) {
    if (!has_gradient[i]) continue;
    const GroupOptions& group = groups[slices_[i].group];
    if (keeps_steps && group.feedback_coefficient != 0.0) kept_or_zeros();
    if (kind_ == OptimizerKind::kSgd) {
      if (group.sgd.momentum != 0.0) state_or_zeros(0);
    } else {
      state_or_zeros(0);
      state_or_zeros(1);
      if (group.adam.amsgrad) state_or_zeros(2);
    }
  }
}

std::vector<kernels::StepOfRun> FusedOptimizer::runs(std::span<const GroupOptions> groups,
                                                     const std::vector<bool>& has_gradient) const {
  const auto line =
      alignment_bytes(options_.device()) / static_cast<std::int64_t>(options_.dtype().itemsize());
  std::vector<kernels::StepOfRun> runs;
  for (std::size_t i = 0; i < slices_.size(); ++i) {
    const ParameterSlice& slice = slices_[i];
    if (slice.numel == 0) continue;
    const GroupOptions& group = groups[slice.group];
    kernels::StepOfRun next{slice.offset, slice.offset + slice.numel, state_offsets_[i]};
    if (has_gradient[i] && kind_ == OptimizerKind::kSgd) {
      kernels::SgdOptions options = group.sgd;
      options.first_step = step_counts_[i] == 0 || !has_momentum_[i];
      next.options = options;
    } else if (has_gradient[i]) {
      kernels::AdamOptions options = group.adam;
      options.step = step_counts_[i] + 1;
      next.options = options;
    }
    if (has_gradient[i] && group.feedback_coefficient != 0.0) {
      next.feedback = {.coefficient = group.feedback_coefficient, .first_step = !has_kept_[i]};
    }
    if (!runs.empty()) {  // neighbours that are stepped alike, with the padding between them
      kernels::StepOfRun& last = runs.back();
      const std::int64_t gap = next.begin - last.end;
      // Adam would make 0 / (0 + eps) of padding.
      const bool padding_stays_zero =
          kind_ == OptimizerKind::kSgd || !has_gradient[i] || group.adam.eps != 0.0;
      if (last.options == next.options && last.feedback == next.feedback && gap < line &&
          (gap == 0 || padding_stays_zero)) {
        last.end = next.end;
        continue;
      }
    }
    runs.push_back(next);
  }
  return runs;
}

const FusedOptimizer::State& FusedOptimizer::find_state(std::string_view name) const {
  const auto found = std::find_if(states_.begin(), states_.end(),
                                  [&](const State& state) { return state.name == name; });
  PD2_CHECK(found != states_.end(), "optimizer state \"", name, "\": ",
            kind_ == OptimizerKind::kSgd ? "SGD has momentum_buffer"
                                         : "Adam has exp_avg, exp_avg_sq, max_exp_avg_sq");
  return *found;
}

at::Tensor FusedOptimizer::state(std::string_view name) const { return find_state(name).flat; }

at::Tensor FusedOptimizer::state_or_zeros(std::string_view name) {
  return state_or_zeros(&find_state(name) - states_.data());
}

at::Tensor FusedOptimizer::state_or_zeros(std::size_t which) {
  at::Tensor& flat = states_[which].flat;
  if (!flat.defined()) {
    flat = zeros_on_huge_pages(state_numel_, options_);
  }
  return flat;
}

std::int64_t FusedOptimizer::step_count(std::size_t i) const { return step_counts_.at(i); }

void FusedOptimizer::set_step_count(std::size_t i, std::int64_t count) {
  PD2_CHECK(count >= 0, "step count: ", count, ": must be at least 0");
  step_counts_.at(i) = count;
}

at::Tensor FusedOptimizer::kept_or_zeros() {
  if (!kept_.defined()) {
    kept_ = zeros_on_huge_pages(state_numel_, options_);
  }
  return kept_;
}

PaddedBytes FusedOptimizer::state_bytes() const {
  std::int64_t element = kept_.defined() ? kept_.element_size() : 0;
  for (const State& state : states_) {
    element += state.flat.defined() ? state.flat.element_size() : 0;
  }
  std::int64_t numel = 0;
  for (const ParameterSlice& slice : slices_) numel += slice.numel;
  return {numel * element, (state_numel_ - numel) * element};
}

}  // namespace pd2
