#include "engine/stage.h"

#include "core/check.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <map>

namespace pd2 {

Stage::Stage(const std::vector<at::Tensor>& parameters, std::vector<std::string> names,
             int num_versions, c10::intrusive_ptr<c10d::ProcessGroup> replicas, CopySumEnd copies)
    : num_versions_(num_versions),
      versions_(num_versions),
      replicas_(std::move(replicas)),
      copies_(std::move(copies)) {
  PD2_ASSERT(!replicas_ || !copies_.sum, "copies in this process have no group");
  const bool has_flags = replicas_ || copies_.sum;
  PD2_ASSERT(parameters.size() == names.size(), names.size(), " names for ", parameters.size());
  std::map<at::ScalarType, std::vector<std::size_t>> by_dtype;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    by_dtype[parameters[i].scalar_type()].push_back(i);
  }
  places_.resize(parameters.size());
  const bool can_rotate = has_slack() && std::ranges::all_of(by_dtype, [](const auto& of_dtype) {
                            return GradAccumulator::dtype(of_dtype.first) == of_dtype.first;
                          });
  slots_.resize(num_versions + (can_rotate ? 1 : 0));
  for (const auto& [dtype, members] : by_dtype) {
    std::vector<at::Tensor> tensors;
    std::vector<std::string> tensor_names;
    for (std::size_t member : members) {
      places_[member] = {layouts_.size(), tensors.size()};
      tensors.push_back(parameters[member].detach());
      tensor_names.push_back(names[member]);
    }
    layouts_.push_back(std::make_unique<FlatLayout>(tensors));
    const FlatLayout& layout = *layouts_.back();
    const std::int64_t num_flags = GradAccumulator::num_flags(layout, has_flags);
    for (auto& slot : slots_) {
      slot.push_back(layout.allocate(dtype, can_rotate ? num_flags : 0));
    }
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      layout.view(slots_.front().back(), i).copy_(tensors[i]);
    }
    std::vector<at::Tensor> buffers;
    for (std::size_t slot = 0; slot < slots_.size() && can_rotate; ++slot) {
      buffers.push_back(slots_[slot].back());
    }
    if (!can_rotate) {
      buffers.push_back(layout.allocate(GradAccumulator::dtype(dtype), num_flags));
    }
    gradients_.push_back(
        std::make_unique<GradAccumulator>(layout, std::move(tensor_names), std::move(buffers)));
  }
  rotate(true);
}

std::size_t Stage::gradient_buffer(std::int64_t batch) const {
  if (rotates()) {
    return versions_.slot_to_write(batch + 1);
  }
  const auto after_the_versions = static_cast<std::size_t>(num_versions_);
  return slots_.size() > after_the_versions ? after_the_versions : 0;
}

void Stage::rotate(bool on) {
  const auto can_rotate = slots_.size() > static_cast<std::size_t>(num_versions_);
  const int num_slots = num_versions_ + (on && can_rotate ? 1 : 0);
  if (num_slots == versions_.num_slots()) {
    return;
  }
  // A batch may be complete whose update has not been asked for.
  const std::int64_t newest = versions_.newest();
  const int from = versions_.slot(newest);
  const std::size_t gradients = gradient_buffer(newest);
  versions_ = WeightStore(num_slots, newest);
  const int to = versions_.slot(newest);
  for (std::size_t buffer = 0; buffer < layouts_.size(); ++buffer) {
    const at::Tensor weights = from == to ? slots_[to][buffer] : slots_[from][buffer].clone();
    gradients_[buffer]->move(gradients, gradient_buffer(newest));
    if (from != to) {
      slots_[to][buffer].copy_(weights);
    }
  }
}

at::Tensor Stage::weight(int slot, std::size_t parameter) const {
  const Place& place = places_.at(parameter);
  return layouts_[place.buffer]->view(slots_.at(slot)[place.buffer], place.index);
}

at::Tensor Stage::gradient(std::size_t parameter) const {
  const Place& place = places_.at(parameter);
  return gradients_[place.buffer]->view(update_.gradients, place.index);
}

bool Stage::has_gradient(std::size_t parameter) const {
  const Place& place = places_.at(parameter);
  return gradients_[place.buffer]->has_gradient(update_.gradients)[place.index];
}

void Stage::attach(std::size_t parameter, const at::Tensor& slot_parameter) {
  const Place& place = places_.at(parameter);
  gradients_[place.buffer]->attach(place.index, slot_parameter);
}

void Stage::begin_batch(std::int64_t batch) {
  const std::size_t buffer = gradient_buffer(batch);
  for (auto& gradient : gradients_) {
    gradient->begin_batch(buffer);
  }
}

void Stage::begin_update(std::int64_t batch) {
  const std::int64_t newest = versions_.newest();
  PD2_ASSERT(newest == batch, "batch ", batch, " updates version ", newest);
  update_ = {versions_.slot(newest), versions_.begin_next(), gradient_buffer(batch)};
}

void Stage::hold_gradients(std::vector<HeldGradient>* where) {
  for (auto& gradient : gradients_) {
    gradient->hold(where);
  }
}

std::vector<c10::intrusive_ptr<c10d::Work>> Stage::start_reduction() {
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  if (!replicas_ && !copies_.sum) {
    return works;
  }
  for (std::size_t buffer = 0; buffer < gradients_.size(); ++buffer) {
    gradients_[buffer]->fill_missing(update_.gradients);
    std::vector<at::Tensor> flat{gradients_[buffer]->flat(update_.gradients)};
    works.push_back(replicas_ ? replicas_->allreduce(flat)
                              : copies_.sum->add(copies_.copy, buffer, flat.front()));
  }
  return works;
}

void Stage::finish_reduction() {
  if (replicas_ || copies_.sum) {
    for (auto& gradient : gradients_) {
      gradient->read_flags(update_.gradients);
    }
  }
}

void Stage::set_optimizer(OptimizerKind kind, const std::vector<int>& group_of_parameter) {
  PD2_ASSERT(group_of_parameter.size() == places_.size(), "a group for each parameter");
  optimizers_.clear();
  for (std::size_t buffer = 0; buffer < layouts_.size(); ++buffer) {
    std::vector<ParameterSlice> slices;
    for (const ParameterView& view : layouts_[buffer]->views()) {
      slices.push_back({view.offset, view.numel, 0});
    }
    for (std::size_t i = 0; i < places_.size(); ++i) {
      if (places_[i].buffer == buffer) {
        slices[places_[i].index].group = group_of_parameter[i];
      }
    }
    const at::Tensor without_flags = slots_.front()[buffer].narrow(0, 0, layouts_[buffer]->numel());
    optimizers_.push_back(std::make_unique<FusedOptimizer>(kind, std::move(slices), without_flags));
  }
}

void Stage::step(std::span<const GroupOptions> groups) {
  PD2_ASSERT(optimizers_.size() == layouts_.size(), "the stage has no fused optimizer");
  for (std::size_t buffer = 0; buffer < layouts_.size(); ++buffer) {
    const GradAccumulator& gradients = *gradients_[buffer];
    optimizers_[buffer]->step(slots_[update_.from][buffer], gradients.gradients(update_.gradients),
                              slots_[update_.to][buffer], groups,
                              gradients.has_gradient(update_.gradients));
  }
}

at::Tensor Stage::optimizer_state(std::string_view name, std::size_t parameter) const {
  const Place& place = places_.at(parameter);
  const at::Tensor flat = optimizers_.at(place.buffer)->state(name);
  return flat.defined() ? layouts_[place.buffer]->view(flat, place.index) : at::Tensor();
}

std::int64_t Stage::step_count(std::size_t parameter) const {
  const Place& place = places_.at(parameter);
  return optimizers_.at(place.buffer)->step_count(place.index);
}

void Stage::set_optimizer_state(std::string_view name, std::size_t parameter,
                                const at::Tensor& value) {
  const Place& place = places_.at(parameter);
  FusedOptimizer& optimizer = *optimizers_.at(place.buffer);
  const FlatLayout& layout = *layouts_[place.buffer];
  if (!optimizer.state(name).defined()) {
    optimizer.set_state(name, layout.allocate(layout.dtype()));
  }
  layout.view(optimizer.state(name), place.index).copy_(value);
}

void Stage::set_step_count(std::size_t parameter, std::int64_t count) {
  const Place& place = places_.at(parameter);
  optimizers_.at(place.buffer)->set_step_count(place.index, count);
}

int Stage::copy_newest_to_next() {
  PD2_ASSERT(!rotates(), "the next version's slot has the gradients");
  if (update_.to != update_.from) {
    for (std::size_t buffer = 0; buffer < layouts_.size(); ++buffer) {
      slots_[update_.to][buffer].copy_(slots_[update_.from][buffer]);
    }
  }
  return update_.to;
}

StageBytes Stage::bytes() const {
  StageBytes bytes;
  for (std::size_t buffer = 0; buffer < layouts_.size(); ++buffer) {
    const FlatLayout& layout = *layouts_[buffer];
    const auto padding = layout.numel() - layout.parameter_numel();
    const auto weight_size = static_cast<std::int64_t>(c10::elementSize(layout.dtype()));
    const at::Tensor& flat = gradients_[buffer]->flat(0);
    const auto gradient_size = static_cast<std::int64_t>(flat.element_size());
    bytes.weights += num_versions_ * layout.parameter_numel() * weight_size;
    bytes.gradients += layout.parameter_numel() * gradient_size;
    bytes.padding +=
        num_versions_ * (slots_.front()[buffer].numel() - layout.parameter_numel()) * weight_size;
    bytes.padding += (flat.numel() - layout.parameter_numel()) * gradient_size;
    if (!optimizers_.empty()) {
      const std::int64_t state = optimizers_[buffer]->state_bytes();
      bytes.optimizer_state += state;
      // Every state tensor has the weights' layout, so the same share of it is padding.
      bytes.padding += layout.parameter_numel() ? state / layout.parameter_numel() * padding : 0;
    }
  }
  return bytes;
}

}  // namespace pd2
