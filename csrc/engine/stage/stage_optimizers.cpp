// The optimizers of a stage: who steps which parameter, the step, and their state.
#include "core/check.h"
#include "engine/stage/stage.h"

#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <utility>

namespace pd2 {

void Stage::set_optimizers(const std::vector<OptimizerGroups>& optimizers, bool keeps_bfloat16) {
  optimizers_.clear();
  stepped_.assign(places_.size(), {});
  for (const OptimizerGroups& groups : optimizers) {
    PD2_ASSERT(groups.of_parameter.size() == places_.size(), "a group for each parameter");
    for (std::size_t buffer = 0; buffer < packings_.size() && !host_; ++buffer) {
      for (const Share& share : shares_of(buffer)) {
        add_fused(groups, {buffer, share.first, share.last, share.begin, share.end}, share.bucket,
                  keeps_bfloat16);
      }
    }
    for (std::size_t bucket = 0; host_ && bucket < host_->buckets().size(); ++bucket) {
      add_fused(groups, host_->buckets()[bucket], bucket, keeps_bfloat16);
    }
  }
  std::ranges::stable_sort(optimizers_, {}, &Fused::bucket);
}

bool Stage::steps_all() const {
  for (std::size_t i = 0; i < places_.size(); ++i) {
    if (owns(i) && stepped_[i].by == nullptr) {
      return false;
    }
  }
  return true;
}

void Stage::add_fused(const OptimizerGroups& groups, const HostMirror::Bucket& range,
                      std::size_t bucket, bool keeps_bfloat16) {
  const std::size_t buffer = range.dtype;
  // Where the host steps, its buffers are stepped in place of a range.
  const std::int64_t begin = host_ ? 0 : range.begin;
  const std::int64_t numel = (host_ ? packings_[buffer]->numel() : range.end) - begin;
  Fused fused{.buffer = buffer,
              .members = {},
              .optimizer = nullptr,
              .bucket = bucket,
              .begin = begin,
              .numel = numel};
  std::vector<ParameterSlice> slices;
  std::vector<std::size_t> parameters;
  for (std::size_t i = 0; i < places_.size(); ++i) {  // in the order of their offsets
    const std::size_t index = places_[i].index;
    if (places_[i].buffer == buffer && groups.of_parameter[i] >= 0 && range.first <= index &&
        index < range.last) {
      const auto [rank, first, count] = elements(i);
      fused.members.push_back(index);
      slices.push_back({view_of(i).offset + first - begin, count, groups.of_parameter[i]});
      parameters.push_back(i);
    }
  }
  if (slices.empty()) {
    return;
  }
  const at::Tensor flat =
      host_ ? host_->gradients(buffer) : gradients_[buffer]->flat(0).narrow(0, begin, numel);
  fused.optimizer = std::make_unique<FusedOptimizer>(
      groups.kind, std::move(slices), flat, keeps_bfloat16 && flat.scalar_type() != at::kDouble);
  fused.master = range_of_masters(buffer, begin, numel);
  for (std::size_t index = 0; index < parameters.size(); ++index) {
    Stepped& stepped = stepped_[parameters[index]];
    PD2_ASSERT(stepped.by == nullptr, "parameter ", parameters[index], " in two optimizers");
    stepped = {fused.optimizer.get(), index};
  }
  optimizers_.push_back(std::move(fused));
}

std::vector<bool> Stage::Fused::of_members(const std::vector<bool>& all) const {
  std::vector<bool> mine;
  for (const std::size_t member : members) {
    mine.push_back(all[member]);
  }
  return mine;
}

int Stage::write_next(std::span<const GroupOptions> groups) {
  PD2_ASSERT(stepped_.size() == places_.size(), "the stage has no optimizer");
  const int from = update_.from, to = update_.to;
  const std::size_t gradients = update_.gradients;
  if (host_) {
    step_on_host(groups);
    return to;
  }
  const bool gives_early = is_shared() && !exchanges_in_order() && steps_all();
  for (Fused& fused : optimizers_) {
    if (gives_early) {
      replicas_->begin_gather(fused.bucket, slots_[to]);
    }
    const GradAccumulator& accumulator = *gradients_[fused.buffer];
    const auto part = [&](const at::Tensor& flat) {
      return flat.narrow(0, fused.begin, fused.numel);
    };
    fused.optimizer->step(part(slots_[from][fused.buffer]), part(accumulator.flat(gradients)),
                          part(slots_[to][fused.buffer]), groups,
                          fused.of_members(accumulator.has_gradient(gradients)), fused.master,
                          update_.factor);
  }
  if (to != from && optimizers_.empty() && !is_shared()) {
    PD2_ASSERT(!rotates() || places_.empty(),
               "the gradients are where the weights would be copied");
    repeat_newest();
  } else if (to != from) {
    for (std::size_t i = 0; i < places_.size(); ++i) {
      if (owns(i) && stepped_[i].by == nullptr) {
        PD2_ASSERT(!rotates(), "the gradient is where the weight would be copied");
        weight(to, i).copy_(weight(from, i));
      }
    }
  }
  return to;
}

void Stage::repeat_newest() {
  const int from = update_.from, to = update_.to;
  if (host_) {
    host_->begin_sending();  // after the gradients have left the slot
    host_->end_sending();
  }
  for (std::size_t buffer = 0; buffer < packings_.size() && to != from; ++buffer) {
    slots_[to][buffer].copy_(slots_[from][buffer]);
  }
}

at::Tensor Stage::optimizer_state(std::string_view name, std::size_t parameter) const {
  const at::Tensor flat = stepped(parameter).by->state(name);
  return flat.defined() ? view_of_state(flat, parameter) : at::Tensor();
}

at::Tensor Stage::view_of_state(const at::Tensor& flat, std::size_t parameter) const {
  const Stepped& stepped = this->stepped(parameter);
  const ParameterView& view = view_of(parameter);
  const std::int64_t begin = flat.storage_offset() + stepped.by->state_offset(stepped.index);
  if (!is_whole(parameter)) {
    return flat.as_strided({elements(parameter).numel}, {1}, begin);
  }
  return flat.as_strided(view.sizes, view.strides, begin);
}

void Stage::fill_state(const at::Tensor& state, std::size_t parameter,
                       const at::Tensor& value) const {
  if (is_whole(parameter) || value.numel() == state.numel()) {
    state.copy_(value);
  } else {
    const ParameterView& view = view_of(parameter);
    const at::Tensor whole = at::empty_strided(view.sizes, view.strides, state.options());
    state.copy_(mine(parameter, whole.copy_(value)));
  }
}

at::Tensor Stage::kept_step(std::size_t parameter) const {
  const Stepped& stepped = this->stepped(parameter);
  return stepped.by->has_kept(stepped.index) ? view_of_state(stepped.by->kept(), parameter)
                                             : at::Tensor();
}

void Stage::set_kept_step(std::size_t parameter, const at::Tensor& value) {
  const Stepped& stepped = this->stepped(parameter);
  if (value.defined()) {
    fill_state(view_of_state(stepped.by->kept_or_zeros(), parameter), parameter, value);
  }
  stepped.by->set_has_kept(stepped.index, value.defined());
}

const Stage::Stepped& Stage::stepped(std::size_t parameter) const {
  const Stepped& stepped = stepped_.at(parameter);
  PD2_CHECK(stepped.by != nullptr, "parameter ", parameter, ": no fused optimizer steps it");
  return stepped;
}

std::int64_t Stage::step_count(std::size_t parameter) const {
  const Stepped& stepped = this->stepped(parameter);
  return stepped.by->step_count(stepped.index);
}

void Stage::set_optimizer_state(std::string_view name, std::size_t parameter,
                                const at::Tensor& value) {
  const Stepped& stepped = this->stepped(parameter);
  stepped.by->state_or_zeros(name);
  fill_state(optimizer_state(name, parameter), parameter, value);
  stepped.by->mark_loaded(stepped.index);
}

void Stage::set_step_count(std::size_t parameter, std::int64_t count) {
  const Stepped& stepped = this->stepped(parameter);
  stepped.by->set_step_count(stepped.index, count);
}

}  // namespace pd2
