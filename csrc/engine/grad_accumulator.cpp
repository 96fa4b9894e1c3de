#include "engine/grad_accumulator.h"

#include "core/check.h"

#include <c10/core/ScalarType.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace pd2 {

class GradAccumulator::Hook : public torch::autograd::PostAccumulateGradHook {
 public:
  Hook(GradAccumulator* owner, std::size_t parameter) : owner_(owner), parameter_(parameter) {}
  void operator()(const torch::autograd::Variable& variable) override {
    owner_->take(parameter_, variable);
  }

 private:
  GradAccumulator* owner_;
  std::size_t parameter_;
};

namespace {

// Half-precision gradients of many microbatches would lose their low bits: add them in float32.
at::ScalarType accumulation_dtype(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16 ? at::kFloat : dtype;
}

}  // namespace

GradAccumulator::GradAccumulator(const FlatLayout& layout, std::vector<std::string> names,
                                 bool flags)
    : layout_(layout), names_(std::move(names)), flags_(flags) {
  const std::size_t count = layout.views().size();
  PD2_ASSERT(names_.size() == count, names_.size(), " names for ", count, " parameters");
  flat_ = layout.allocate(accumulation_dtype(layout.dtype()),
                          flags ? static_cast<std::int64_t>(count) : 0);
  for (std::size_t i = 0; i < count; ++i) {
    views_.push_back(layout.view(flat_, i));
  }
  has_gradient_.assign(count, false);
}

void GradAccumulator::attach(std::size_t parameter, const at::Tensor& slot_parameter) {
  torch::autograd::impl::set_post_acc_grad_hooks(slot_parameter,
                                                 std::make_unique<Hook>(this, parameter));
}

bool GradAccumulator::takes_from(const torch::autograd::Node& node) {
  return dynamic_cast<const Hook*>(node.tensor_post_acc_grad_hooks().get()) != nullptr;
}

void GradAccumulator::begin_batch() { has_gradient_.assign(has_gradient_.size(), false); }

void GradAccumulator::take(std::size_t parameter, const at::Tensor& variable) {
  at::Tensor& gradient = variable.mutable_grad();
  PD2_CHECK(!gradient.is_sparse(), "parameter ", names_[parameter],
            ": gradients must be dense, got a sparse one (use sparse=False)");
  if (held_) {
    held_->push_back({this, parameter, gradient});
  } else {
    add(parameter, gradient);
  }
  gradient.reset();
}

void GradAccumulator::add(std::size_t parameter, const at::Tensor& gradient) {
  if (has_gradient_[parameter]) {
    views_[parameter].add_(gradient);
  } else {
    views_[parameter].copy_(gradient);
    has_gradient_[parameter] = true;
  }
}

at::Tensor GradAccumulator::gradients() const { return flat_.narrow(0, 0, layout_.numel()); }

void GradAccumulator::fill_missing() {
  PD2_ASSERT(flags_, "no flags in this buffer");
  at::Tensor flags = flat_.narrow(0, layout_.numel(), static_cast<std::int64_t>(views_.size()));
  flags.fill_(1);
  for (std::size_t i = 0; i < views_.size(); ++i) {
    if (!has_gradient_[i]) {
      views_[i].zero_();
      flags[static_cast<std::int64_t>(i)].zero_();
    }
  }
}

void GradAccumulator::read_flags() {
  PD2_ASSERT(flags_, "no flags in this buffer");
  const at::Tensor flags =
      flat_.narrow(0, layout_.numel(), static_cast<std::int64_t>(views_.size()))
          .to(at::kCPU, at::kDouble);
  const double* values = flags.const_data_ptr<double>();
  for (std::size_t i = 0; i < views_.size(); ++i) {
    has_gradient_[i] = values[i] != 0;
  }
}

}  // namespace pd2
