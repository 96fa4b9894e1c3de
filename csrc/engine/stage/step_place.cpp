#include "engine/stage/step_place.h"

#include "core/check.h"

#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <utility>

namespace pd2 {

void StepPlace::share(bool shares, const std::vector<bool>& may_cut, bool norms,
                      const std::function<bool()>& is_stopped) {
  if (gradients_.replicas() && (shares || gradients_.is_shared())) {
    fused_.clear();
    stepped_.clear();
    masters_.share(shares, may_cut, norms, is_stopped);
  }
}

std::vector<Share> StepPlace::runs() const {
  std::vector<Share> runs;
  for (std::size_t buffer = 0; buffer < layout_.buffers().size() && !host_; ++buffer) {
    const std::vector<Share> of_buffer = masters_.shares_of(buffer);
    runs.insert(runs.end(), of_buffer.begin(), of_buffer.end());
  }
  for (std::size_t i = 0; host_ && i < host_->buckets().size(); ++i) {
    const HostMirror::Bucket& each = host_->buckets()[i];
    runs.push_back({each.dtype, 0, each.first, each.last, each.begin, each.end, i});
  }
  return runs;
}

void StepPlace::set_optimizers(const std::vector<OptimizerGroups>& optimizers) {
  fused_.clear();
  stepped_.assign(layout_.num_parameters(), {});
  for (const OptimizerGroups& groups : optimizers) {
    PD2_ASSERT(groups.of_parameter.size() == stepped_.size(), "a group for each parameter");
    for (const Share& run : runs()) {
      add_fused(groups, run);
    }
  }
  std::ranges::stable_sort(fused_, {}, [](const Fused& fused) { return fused.run.bucket; });
}

void StepPlace::add_fused(const OptimizerGroups& groups, const Share& run) {
  Fused fused{.run = run, .members = {}, .optimizer = nullptr, .master = {}};
  std::vector<ParameterSlice> slices;
  std::vector<std::size_t> parameters;
  for (std::size_t i = 0; i < stepped_.size(); ++i) {  // in the order of their offsets
    const auto [buffer, index] = layout_.place(i);
    if (buffer == run.dtype && groups.of_parameter[i] >= 0 && run.first <= index &&
        index < run.last) {
      const auto [rank, first, count] = masters_.elements(i);
      fused.members.push_back(index);
      slices.push_back({layout_.view(i).offset + first - run.begin, count, groups.of_parameter[i]});
      parameters.push_back(i);
    }
  }
  if (slices.empty()) {
    return;
  }
  const std::int64_t numel = run.end - run.begin;
  const at::Tensor flat =
      (host_ ? host_->gradients(run.dtype) : gradients_.of_dtype(run.dtype).flat(0))
          .narrow(0, run.begin, numel);
  fused.optimizer = std::make_unique<FusedOptimizer>(groups.kind, std::move(slices), flat);
  fused.master = masters_.range(run.dtype, run.begin, numel);
  for (std::size_t index = 0; index < parameters.size(); ++index) {
    Stepped& stepped = stepped_[parameters[index]];
    PD2_ASSERT(stepped.by == nullptr, "parameter ", parameters[index], " in two optimizers");
    stepped = {fused.optimizer.get(), index};
  }
  fused_.push_back(std::move(fused));
}

bool StepPlace::steps_all() const {
  for (std::size_t i = 0; i < stepped_.size(); ++i) {
    if (masters_.owns(i) && !is_fused(i)) {
      return false;
    }
  }
  return true;
}

void StepPlace::step(int from, int to, std::span<const GroupOptions> groups,
                     const at::Tensor& factor) {
  PD2_ASSERT(has_optimizers(), "the stage has no optimizer");
  const std::vector<at::Tensor>& read = slots_.flat(from);
  const std::vector<at::Tensor>& written = slots_.flat(to);
  const bool gives_early =
      gradients_.is_shared() && !gradients_.exchanges_in_order() && steps_all();
  if (host_) {
    PD2_ASSERT(steps_all(), "an optimizer without a fused pass works on the host");
    host_->take_changes(read, masters_.flats());
    host_->begin_sending();
  }
  for (std::size_t i = 0; i < fused_.size(); ++i) {
    const Fused& fused = fused_[i];
    const std::size_t buffer = fused.run.dtype, bucket = fused.run.bucket;
    if (gives_early) {
      gradients_.replicas()->begin_gather(bucket, written);
    } else if (host_) {
      host_->await(bucket);
      step_fused(fused, host_->weights(buffer), host_->weights(buffer), groups, factor);
      if (i + 1 == fused_.size() || fused_[i + 1].run.bucket != bucket) {
        host_->send(bucket, written[buffer]);
      }
      continue;
    }
    step_fused(fused, read[buffer], written[buffer], groups, factor);
  }
  if (host_) {
    host_->end_sending();
  } else if (from != to && fused_.empty() && !gradients_.is_shared()) {
    PD2_ASSERT(!slots_.rotates() || stepped_.empty(),
               "the gradients are where the weights would be copied");
    repeat(from, to);
  } else if (from != to) {
    for (std::size_t i = 0; i < stepped_.size(); ++i) {
      if (masters_.owns(i) && !is_fused(i)) {
        PD2_ASSERT(!slots_.rotates(), "the gradient is where the weight would be copied");
        slots_.weight(to, i).copy_(slots_.weight(from, i));
      }
    }
  }
}

void StepPlace::step_fused(const Fused& fused, const at::Tensor& from, const at::Tensor& to,
                           std::span<const GroupOptions> groups, const at::Tensor& factor) {
  const auto& [dtype, rank, first, last, begin, end, bucket] = fused.run;
  const std::vector<bool>& has_gradient = gradients_.has_gradients(dtype);
  std::vector<bool> of_members;
  for (const std::size_t member : fused.members) {
    of_members.push_back(has_gradient[member]);
  }
  const std::int64_t numel = end - begin;
  fused.optimizer->step(from.narrow(0, begin, numel),
                        gradients_.flat(dtype).narrow(0, begin, numel), to.narrow(0, begin, numel),
                        groups, of_members, fused.master, factor);
}

void StepPlace::repeat(int from, int to) {
  if (host_) {
    host_->begin_sending();  // after the gradients have left the slot
    host_->end_sending();
  }
  for (std::size_t buffer = 0; buffer < layout_.buffers().size() && to != from; ++buffer) {
    slots_.flat(to)[buffer].copy_(slots_.flat(from)[buffer]);
  }
}

// ---------------------------------------------------------------- state

const StepPlace::Stepped& StepPlace::stepped(std::size_t parameter) const {
  const Stepped& stepped = stepped_.at(parameter);
  PD2_CHECK(stepped.by != nullptr, "parameter ", parameter, ": no fused optimizer steps it");
  return stepped;
}

at::Tensor StepPlace::view_of_state(const at::Tensor& flat, std::size_t parameter) const {
  const auto [by, index] = stepped(parameter);
  const ParameterView& view = layout_.view(parameter);
  const std::int64_t begin = flat.storage_offset() + by->state_offset(index);
  if (!masters_.is_whole(parameter)) {
    return flat.as_strided({masters_.elements(parameter).numel}, {1}, begin);
  }
  return flat.as_strided(view.sizes, view.strides, begin);
}

void StepPlace::fill_state(const at::Tensor& state, std::size_t parameter,
                           const at::Tensor& value) const {
  if (masters_.is_whole(parameter) || value.numel() == state.numel()) {
    state.copy_(value);
  } else {
    const ParameterView& view = layout_.view(parameter);
    const at::Tensor whole = at::empty_strided(view.sizes, view.strides, state.options());
    state.copy_(masters_.mine(parameter, whole.copy_(value)));
  }
}

at::Tensor StepPlace::state(std::string_view name, std::size_t parameter) const {
  const at::Tensor flat = stepped(parameter).by->state(name);
  return flat.defined() ? view_of_state(flat, parameter) : at::Tensor();
}

void StepPlace::set_state(std::string_view name, std::size_t parameter, const at::Tensor& value) {
  const auto [by, index] = stepped(parameter);
  by->state_or_zeros(name);
  fill_state(state(name, parameter), parameter, value);
  by->mark_loaded(index);
}

std::int64_t StepPlace::step_count(std::size_t parameter) const {
  const auto [by, index] = stepped(parameter);
  return by->step_count(index);
}

void StepPlace::set_step_count(std::size_t parameter, std::int64_t count) {
  const auto [by, index] = stepped(parameter);
  by->set_step_count(index, count);
}

at::Tensor StepPlace::kept_step(std::size_t parameter) const {
  const auto [by, index] = stepped(parameter);
  return by->has_kept(index) ? view_of_state(by->kept(), parameter) : at::Tensor();
}

void StepPlace::set_kept_step(std::size_t parameter, const at::Tensor& value) {
  const auto [by, index] = stepped(parameter);
  if (value.defined()) {
    fill_state(view_of_state(by->kept_or_zeros(), parameter), parameter, value);
  }
  by->set_has_kept(index, value.defined());
}

PaddedBytes StepPlace::state_bytes() const {
  PaddedBytes sum;
  for (const Fused& fused : fused_) {
    const auto [used, padding] = fused.optimizer->state_bytes();
    sum.used += used;
    sum.padding += padding;
  }
  return sum;
}

}  // namespace pd2
