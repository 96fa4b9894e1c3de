#include "engine/stage.h"

#include "core/check.h"

#include <c10/core/ScalarType.h>

#include <map>

namespace pd2 {

Stage::Stage(const std::vector<at::Tensor>& parameters, std::vector<std::string> names,
             int num_slots, c10::intrusive_ptr<c10d::ProcessGroup> replicas, CopySumEnd copies)
    : versions_(num_slots), replicas_(std::move(replicas)), copies_(std::move(copies)) {
  PD2_ASSERT(!replicas_ || !copies_.sum, "copies in this process have no group");
  const bool has_flags = replicas_ || copies_.sum;
  PD2_ASSERT(parameters.size() == names.size(), names.size(), " names for ", parameters.size());
  std::map<at::ScalarType, std::vector<std::size_t>> by_dtype;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    by_dtype[parameters[i].scalar_type()].push_back(i);
  }
  places_.resize(parameters.size());
  slots_.resize(num_slots);
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
    for (auto& slot : slots_) {
      slot.push_back(layout.allocate(dtype));
      for (std::size_t i = 0; i < tensors.size(); ++i) {
        layout.view(slot.back(), i).copy_(tensors[i]);
      }
    }
    gradients_.push_back(
        std::make_unique<GradAccumulator>(layout, std::move(tensor_names), has_flags));
  }
}

at::Tensor Stage::weight(int slot, std::size_t parameter) const {
  const Place& place = places_.at(parameter);
  return layouts_[place.buffer]->view(slots_.at(slot)[place.buffer], place.index);
}

at::Tensor Stage::gradient(std::size_t parameter) const {
  const Place& place = places_.at(parameter);
  return gradients_[place.buffer]->view(place.index);
}

bool Stage::has_gradient(std::size_t parameter) const {
  const Place& place = places_.at(parameter);
  return gradients_[place.buffer]->has_gradient()[place.index];
}

void Stage::attach(std::size_t parameter, const at::Tensor& slot_parameter) {
  const Place& place = places_.at(parameter);
  gradients_[place.buffer]->attach(place.index, slot_parameter);
}

void Stage::begin_batch() {
  for (auto& gradient : gradients_) {
    gradient->begin_batch();
  }
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
    gradients_[buffer]->fill_missing();
    std::vector<at::Tensor> flat{gradients_[buffer]->flat()};
    works.push_back(replicas_ ? replicas_->allreduce(flat)
                              : copies_.sum->add(copies_.copy, buffer, flat.front()));
  }
  return works;
}

void Stage::finish_reduction() {
  if (replicas_ || copies_.sum) {
    for (auto& gradient : gradients_) {
      gradient->read_flags();
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
    optimizers_.push_back(
        std::make_unique<FusedOptimizer>(kind, std::move(slices), slots_.front()[buffer]));
  }
}

void Stage::step(std::span<const GroupOptions> groups) {
  PD2_ASSERT(optimizers_.size() == layouts_.size(), "the stage has no fused optimizer");
  const int to = versions_.slot_to_write();
  const int from = versions_.slot(versions_.newest());
  for (std::size_t buffer = 0; buffer < layouts_.size(); ++buffer) {
    optimizers_[buffer]->step(slots_[from][buffer], gradients_[buffer]->gradients(),
                              slots_[to][buffer], groups, gradients_[buffer]->has_gradient());
  }
  versions_.publish();
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
  const int to = versions_.slot_to_write();
  const int from = versions_.slot(versions_.newest());
  if (to != from) {
    for (std::size_t buffer = 0; buffer < layouts_.size(); ++buffer) {
      slots_[to][buffer].copy_(slots_[from][buffer]);
    }
  }
  return to;
}

void Stage::spread_newest() {
  const int from = versions_.slot(versions_.newest());
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
    for (std::size_t buffer = 0; buffer < layouts_.size(); ++buffer) {
      if (static_cast<int>(slot) != from) {
        slots_[slot][buffer].copy_(slots_[from][buffer]);
      }
    }
  }
  versions_.reset();
}

StageBytes Stage::bytes() const {
  StageBytes bytes;
  for (std::size_t buffer = 0; buffer < layouts_.size(); ++buffer) {
    const FlatLayout& layout = *layouts_[buffer];
    const auto padding = layout.numel() - layout.parameter_numel();
    const auto weight_size = static_cast<std::int64_t>(c10::elementSize(layout.dtype()));
    const at::Tensor& flat = gradients_[buffer]->flat();
    const auto gradient_size = static_cast<std::int64_t>(flat.element_size());
    const auto slots = static_cast<std::int64_t>(slots_.size());
    bytes.weights += slots * layout.parameter_numel() * weight_size;
    bytes.gradients += layout.parameter_numel() * gradient_size;
    bytes.padding += slots * padding * weight_size;
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
