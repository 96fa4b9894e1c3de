#include "engine/gradients/grad_accumulator.h"

#include "core/check.h"

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

namespace pd2 {
namespace {

// Torch gives a list of tensors to a device in few launches if each is laid out as its counterpart.
// One that is not would have all others added one by one.
at::Tensor laid_out_like(const at::Tensor& view, const at::Tensor& gradient) {
  if (gradient.strides() == view.strides()) {
    return gradient;
  }
  return at::empty_like(view, gradient.options()).copy_(gradient);
}

}  // namespace

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

at::ScalarType GradAccumulator::dtype(at::ScalarType weights,
                                      std::optional<at::ScalarType> narrow) {
  const bool is_half = weights == at::kHalf || weights == at::kBFloat16;
  return is_half && weights != narrow ? at::kFloat : weights;
}

GradAccumulator::GradAccumulator(const FlatPacking& packing, std::vector<std::string> names,
                                 std::vector<at::Tensor> buffers)
    : packing_(packing), names_(std::move(names)) {
  const std::size_t count = packing.views().size();
  PD2_ASSERT(names_.size() == count, names_.size(), " names for ", count, " parameters");
  PD2_ASSERT(!buffers.empty(), "no buffer for gradients");
  group_bytes_ = buffers.front().is_cpu() ? 0 : kGroupBytes;
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
  forget_kept();
}

void GradAccumulator::set_added(const std::vector<bool>& has_gradient) {
  buffers_[current_].has_gradient = has_gradient;
  forget_kept();
}

// What a backward that failed has left.
void GradAccumulator::forget_kept() {
  kept_.clear();
  kept_bytes_ = 0;
  awaits_end_ = false;
}

void GradAccumulator::take(std::size_t parameter, const at::Tensor& variable) {
  at::Tensor& gradient = variable.mutable_grad();
  PD2_CHECK(!gradient.is_sparse(), "parameter ", names_[parameter],
            ": gradients must be dense, got a sparse one (use sparse=False)");
  if (held_) {
    held_->push_back({this, parameter, gradient});
  } else if (group_bytes_ > 0) {
    keep(parameter, gradient);
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

void GradAccumulator::keep(std::size_t parameter, const at::Tensor& gradient) {
  if (std::ranges::any_of(kept_, [&](const Kept& kept) { return kept.parameter == parameter; })) {
    add_kept();  // which comes first
  }
  kept_.push_back({parameter, gradient});
  kept_bytes_ += static_cast<std::int64_t>(gradient.nbytes());
  most_kept_bytes_ = std::max(most_kept_bytes_.load(), kept_bytes_);
  if (kept_bytes_ >= group_bytes_) {
    add_kept();
  } else if (!std::exchange(awaits_end_, true)) {
    torch::autograd::Engine::get_default_engine().queue_callback([this] {
      awaits_end_ = false;
      add_kept();
    });
  }
}

void GradAccumulator::add_kept() {
  Buffer& buffer = buffers_[current_];
  std::vector<at::Tensor> sums, added, empty, written;
  for (const Kept& kept : kept_) {
    const bool is_first = !buffer.has_gradient[kept.parameter];
    const at::Tensor& view = buffer.views[kept.parameter];
    (is_first ? empty : sums).push_back(view);
    (is_first ? written : added).push_back(laid_out_like(view, kept.gradient));
    buffer.has_gradient[kept.parameter] = true;
  }
  if (!sums.empty()) {
    add_lists(sums, added);
  }
  if (!empty.empty()) {
    at::_foreach_copy_(empty, written);
  }
  kept_bytes_ = 0;
  for (const Kept& kept : std::exchange(kept_, {})) {
    if (on_added_) {
      on_added_(kept.parameter);
    }
  }
}

// For few launches both lists must be of one dtype, too: 16-bit gradients become float32 first,
// as an addition would make of each.
void GradAccumulator::add_lists(at::TensorList sums, at::TensorList added) {
  if (sums.front().scalar_type() == added.front().scalar_type()) {
    at::_foreach_add_(sums, added);
    return;
  }
  for (std::size_t count = 0; !sums.empty(); sums = sums.slice(count), added = added.slice(count)) {
    std::size_t bytes = 0;
    for (count = 0; count < sums.size(); ++count) {
      bytes += sums[count].nbytes();
      if (count > 0 && bytes > static_cast<std::size_t>(group_bytes_)) {
        break;
      }
    }
    if (count == 1) {
      sums.front().add_(added.front());  // a launch in any case
      continue;
    }
    const FlatPacking packing(sums.slice(0, count).vec());
    const at::Tensor flat = at::empty({packing.numel()}, sums.front().options());
    std::vector<at::Tensor> lifted;
    for (std::size_t i = 0; i < count; ++i) {
      lifted.push_back(packing.view(flat, i));
    }
    at::_foreach_copy_(lifted, added.slice(0, count));
    at::_foreach_add_(sums.slice(0, count), lifted);
    const auto lifted_bytes = static_cast<std::int64_t>(flat.nbytes());
    most_kept_bytes_ = std::max(most_kept_bytes_.load(), kept_bytes_ + lifted_bytes);
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

void GradAccumulator::move(std::size_t count, std::size_t from, std::size_t to) {
  if (buffers_.size() < count) {
    const at::Tensor& like = buffers_.front().flat;
    append(packing_.allocate(like.scalar_type(), like.numel() - packing_.numel()));
  }
  for (std::size_t i = 0; i < names_.size() && from != to; ++i) {
    if (buffers_[from].has_gradient[i]) {
      buffers_[to].views[i].copy_(buffers_[from].views[i]);
    }
  }
  if (from != to) {
    buffers_[to].has_gradient = buffers_[from].has_gradient;
    current_ = to;
  }
  if (buffers_.size() > count) {
    buffers_.pop_back();
  }
}

}  // namespace pd2
