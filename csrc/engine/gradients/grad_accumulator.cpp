#include "engine/gradients/grad_accumulator.h"

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

at::ScalarType GradAccumulator::dtype(at::ScalarType weights) {
  return weights == at::kHalf || weights == at::kBFloat16 ? at::kFloat : weights;
}

GradAccumulator::GradAccumulator(const FlatPacking& packing, std::vector<std::string> names,
                                 std::vector<at::Tensor> buffers)
    : packing_(packing), names_(std::move(names)) {
  const std::size_t count = packing.views().size();
  PD2_ASSERT(names_.size() == count, names_.size(), " names for ", count, " parameters");
  PD2_ASSERT(!buffers.empty(), "no buffer for gradients");
  for (at::Tensor& flat : buffers) {
    append(std::move(flat));
  }
}

void GradAccumulator::append(at::Tensor flat) {
  Buffer& buffer = buffers_.emplace_back();
  for (std::size_t i = 0; i < names_.size(); ++i) {
    buffer.views.push_back(packing_.view(flat, i));
  }
  buffer.flat = std::move(flat);
  buffer.has_gradient.assign(names_.size(), false);
}

void GradAccumulator::add_buffer() {
  const at::Tensor& like = buffers_.front().flat;
  append(packing_.allocate(like.scalar_type(), like.numel() - packing_.numel()));
}

void GradAccumulator::attach(std::size_t parameter, const at::Tensor& slot_parameter) {
  torch::autograd::impl::set_post_acc_grad_hooks(slot_parameter,
                                                 std::make_unique<Hook>(this, parameter));
}

bool GradAccumulator::takes_from(const torch::autograd::Node& node) {
  return dynamic_cast<const Hook*>(node.tensor_post_acc_grad_hooks().get()) != nullptr;
}

void GradAccumulator::begin_batch(std::size_t buffer) {
  current_ = buffer;
  std::vector<bool>& has_gradient = buffers_.at(buffer).has_gradient;
  has_gradient.assign(has_gradient.size(), false);
}

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
  Buffer& buffer = buffers_[current_];
  if (buffer.has_gradient[parameter]) {
    buffer.views[parameter].add_(gradient);
  } else {
    buffer.views[parameter].copy_(gradient);
    buffer.has_gradient[parameter] = true;
  }
  if (on_added_) {
    on_added_(parameter);
  }
}

at::Tensor GradAccumulator::gradients(std::size_t buffer) const {
  return flat(buffer).narrow(0, 0, packing_.numel());
}

at::Tensor GradAccumulator::flags(std::size_t buffer) const {
  const std::int64_t count = flat(buffer).numel() - packing_.numel();
  PD2_ASSERT(count == static_cast<std::int64_t>(names_.size()), "no flags in this buffer");
  return flat(buffer).narrow(0, packing_.numel(), count);
}

void GradAccumulator::fill_missing(std::size_t buffer) {
  at::Tensor flags = this->flags(buffer);
  flags.fill_(1);
  for (std::size_t i = 0; i < names_.size(); ++i) {
    if (!buffers_[buffer].has_gradient[i]) {
      buffers_[buffer].views[i].zero_();
      flags[static_cast<std::int64_t>(i)].zero_();
    }
  }
}

void GradAccumulator::read_flags(std::size_t buffer) {
  const at::Tensor flags = this->flags(buffer).to(at::kCPU, at::kDouble);
  const double* values = flags.const_data_ptr<double>();
  for (std::size_t i = 0; i < names_.size(); ++i) {
    buffers_[buffer].has_gradient[i] = values[i] != 0;
  }
}

void GradAccumulator::move(std::size_t from, std::size_t to) {
  if (from == to) {
    return;
  }
  for (std::size_t i = 0; i < names_.size(); ++i) {
    if (buffers_[from].has_gradient[i]) {
      buffers_[to].views[i].copy_(buffers_[from].views[i]);
    }
  }
  buffers_[to].has_gradient = buffers_[from].has_gradient;
  current_ = to;
}

}  // namespace pd2
