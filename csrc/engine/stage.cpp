#include "engine/stage.h"

#include "core/check.h"

#include <c10/core/ScalarType.h>

#include <map>

namespace pd2 {
namespace {

void check_stepped(const FusedOptimizer* by, std::size_t parameter) {
  PD2_CHECK(by != nullptr, "parameter ", parameter, ": no fused optimizer steps it");
}

}  // namespace

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

void Stage::set_optimizers(const std::vector<OptimizerGroups>& optimizers) {
  optimizers_.clear();
  stepped_.assign(places_.size(), {});
  for (const OptimizerGroups& groups : optimizers) {
    PD2_ASSERT(groups.of_parameter.size() == places_.size(), "a group for each parameter");
    for (std::size_t buffer = 0; buffer < layouts_.size(); ++buffer) {
      Fused fused{.buffer = buffer, .members = {}, .optimizer = nullptr};
      std::vector<ParameterSlice> slices;
      std::vector<std::size_t> parameters;
      for (std::size_t i = 0; i < places_.size(); ++i) {  // in the order of their offsets
        if (places_[i].buffer == buffer && groups.of_parameter[i] >= 0) {
          const ParameterView& view = layouts_[buffer]->views()[places_[i].index];
          fused.members.push_back(places_[i].index);
          slices.push_back({view.offset, view.numel, groups.of_parameter[i]});
          parameters.push_back(i);
        }
      }
      if (slices.empty()) {
        continue;
      }
      fused.optimizer =
          std::make_unique<FusedOptimizer>(groups.kind, std::move(slices), slots_.front()[buffer]);
      for (std::size_t index = 0; index < parameters.size(); ++index) {
        Stepped& stepped = stepped_[parameters[index]];
        PD2_ASSERT(stepped.by == nullptr, "parameter ", parameters[index], " in two optimizers");
        stepped = {fused.optimizer.get(), index};
      }
      optimizers_.push_back(std::move(fused));
    }
  }
}

int Stage::write_next(std::span<const GroupOptions> groups) {
  PD2_ASSERT(stepped_.size() == places_.size(), "the stage has no optimizer");
  const int to = versions_.slot_to_write();
  const int from = versions_.slot(versions_.newest());
  for (Fused& fused : optimizers_) {
    const std::vector<bool>& has_gradient = gradients_[fused.buffer]->has_gradient();
    std::vector<bool> of_members;
    for (std::size_t member : fused.members) {
      of_members.push_back(has_gradient[member]);
    }
    fused.optimizer->step(slots_[from][fused.buffer], gradients_[fused.buffer]->gradients(),
                          slots_[to][fused.buffer], groups, of_members);
  }
  if (to != from && optimizers_.empty()) {
    for (std::size_t buffer = 0; buffer < layouts_.size(); ++buffer) {
      slots_[to][buffer].copy_(slots_[from][buffer]);
    }
  } else if (to != from) {
    for (std::size_t i = 0; i < places_.size(); ++i) {
      if (stepped_[i].by == nullptr) {
        weight(to, i).copy_(weight(from, i));
      }
    }
  }
  return to;
}

at::Tensor Stage::optimizer_state(std::string_view name, std::size_t parameter) const {
  const Stepped& stepped = stepped_.at(parameter);
  check_stepped(stepped.by, parameter);
  const at::Tensor flat = stepped.by->state(name);
  if (!flat.defined()) {
    return {};
  }
  const Place& place = places_.at(parameter);
  const ParameterView& view = layouts_[place.buffer]->views()[place.index];
  return flat.as_strided(view.sizes, view.strides, stepped.by->state_offset(stepped.index));
}

std::int64_t Stage::step_count(std::size_t parameter) const {
  const Stepped& stepped = stepped_.at(parameter);
  check_stepped(stepped.by, parameter);
  return stepped.by->step_count(stepped.index);
}

void Stage::set_optimizer_state(std::string_view name, std::size_t parameter,
                                const at::Tensor& value) {
  const Stepped& stepped = stepped_.at(parameter);
  check_stepped(stepped.by, parameter);
  if (!stepped.by->state(name).defined()) {
    stepped.by->set_state(name, at::zeros({stepped.by->state_numel()}, value.options()));
  }
  optimizer_state(name, parameter).copy_(value);
}

void Stage::set_step_count(std::size_t parameter, std::int64_t count) {
  const Stepped& stepped = stepped_.at(parameter);
  check_stepped(stepped.by, parameter);
  stepped.by->set_step_count(stepped.index, count);
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
  }
  for (const Fused& fused : optimizers_) {
    bytes.optimizer_state += fused.optimizer->state_bytes();
    bytes.padding += fused.optimizer->state_padding_bytes();
  }
  return bytes;
}

}  // namespace pd2
