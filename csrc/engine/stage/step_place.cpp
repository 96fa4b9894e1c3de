#include "engine/stage/step_place.h"

#include "core/check.h"
#include "engine/weights/split_master.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <utility>

namespace pd2 {

StepPlace::StepPlace(const StageLayout& layout, const Slots& slots, GradientPath& gradients)
    : layout_(layout), slots_(slots), gradients_(gradients), host_(gradients.host()) {
  for (const auto& [packing, names, of_gradients, master] : layout.buffers()) {
    at::Tensor& flat = masters_.emplace_back();
    if (master && host_) {
      flat = zeros_on_huge_pages(packing.numel(), at::device(at::kCPU).dtype(*master));
    } else if (master) {
      flat = packing.allocate(*master);
    }
  }
}

// ---------------------------------------------------------------- masters

at::Tensor StepPlace::newest(int slot, std::size_t parameter) const {
  const auto [buffer, index] = layout_.place(parameter);
  return host_ ? host_->weight(buffer, index) : slots_.weight(slot, parameter);
}

at::Tensor StepPlace::master(int slot, std::size_t parameter) const {
  if (!masters_[layout_.place(parameter).buffer].defined()) {
    return slots_.weight(slot, parameter);
  }
  if (host_) {
    host_->take_changes(slots_.flat(slot), masters_);
  }
  const at::Tensor kept = kept_master(parameter);
  const at::Tensor newest = this->newest(slot, parameter);
  if (kept.defined() && is_whole(parameter)) {
    return is_split(parameter) ? join_master(newest, kept) : kept;
  }
  const at::Tensor rounded = newest.to(at::kFloat);
  if (kept.defined()) {
    mine(parameter, rounded)
        .copy_(is_split(parameter) ? join_master(mine(parameter, newest), kept) : kept);
  }
  return rounded;
}

void StepPlace::set_master(std::size_t parameter, const at::Tensor& value) {
  const at::Tensor weight = newest(slots_.newest(), parameter);
  at::Tensor kept = kept_master(parameter);
  const at::Tensor part = kept.defined() && !is_whole(parameter) ? kept : at::Tensor();
  if (!kept.defined() || part.defined()) {  // another replica's, whose rounding is here
    kept = at::empty_like(weight, masters_[layout_.place(parameter).buffer].options());
  }
  if (is_split(parameter)) {
    split_master(value.to(kept.device()), weight, kept);
  } else {
    kept.copy_(value);
    weight.copy_(kept);
  }
  if (part.defined()) {
    part.copy_(mine(parameter, kept));
  }
  if (host_) {
    slots_.weight(slots_.newest(), parameter).copy_(weight);
  }
}

bool StepPlace::is_split(std::size_t parameter) const {
  return layout_.buffers()[layout_.place(parameter).buffer].master == at::kShort;
}

bool StepPlace::hides_master(std::size_t parameter) const {
  return masters_[layout_.place(parameter).buffer].defined() &&
         (is_split(parameter) || host_ || gradients_.is_shared());
}

std::vector<at::Tensor> StepPlace::hidden_masters(const std::function<bool()>& is_stopped) {
  const bool is_shared = gradients_.is_shared();
  std::vector<at::Tensor> wholes(masters_.size()), hidden(layout_.num_parameters());
  for (std::size_t buffer = 0; buffer < masters_.size() && is_shared; ++buffer) {
    if (masters_[buffer].defined()) {
      wholes[buffer] = whole_buffer(buffer);
    }
  }
  if (is_shared) {
    gradients_.replicas()->settle(is_stopped);
    gradients_.replicas()->gather(nullptr, wholes, is_stopped);
  }
  for (std::size_t i = 0; i < hidden.size(); ++i) {
    if (hides_master(i) && !is_shared) {
      hidden[i] = master(slots_.newest(), i);
    } else if (hides_master(i)) {
      const at::Tensor kept = layout_.view(wholes, i);
      hidden[i] = is_split(i) ? join_master(slots_.weight(slots_.newest(), i), kept) : kept;
    }
  }
  return hidden;
}

void StepPlace::round_masters(int slot) {
  for (std::size_t buffer = 0; buffer < masters_.size() && !host_; ++buffer) {
    const at::Tensor& master = masters_[buffer];
    if (master.defined() && master.scalar_type() == at::kFloat && !gradients_.is_shared()) {
      slots_.flat(slot)[buffer].narrow(0, 0, master.numel()).copy_(master);  // without the flags
    }
  }
}

// ---------------------------------------------------------------- shares of replicas

void StepPlace::share(bool shares, const std::vector<bool>& may_cut, bool norms,
                      const std::function<bool()>& is_stopped) {
  ReplicaSum* replicas = gradients_.replicas();
  if (!replicas || (!shares && !replicas->is_shared())) {
    return;
  }
  if (shares && replicas->is_shared()) {  // perhaps in another way
    share(false, {}, false, is_stopped);
  }
  PD2_ASSERT(!host_ || !shares, "the host steps whole buffers");
  std::vector<at::Tensor> wholes = masters_;
  for (std::size_t buffer = 0; buffer < masters_.size() && !shares; ++buffer) {
    if (masters_[buffer].defined()) {
      wholes[buffer] = whole_buffer(buffer);
    }
  }
  if (!shares) {
    replicas->gather(nullptr, wholes, is_stopped);
  }
  fused_.clear();
  stepped_.clear();
  gradients_.share(shares, may_cut, norms);
  owned_.assign(shares ? layout_.num_parameters() : 0, {});
  for (const Share& share : replicas->shares()) {
    for (std::size_t i = 0; i < owned_.size(); ++i) {
      const auto [buffer, index] = layout_.place(i);
      if (buffer != share.dtype || index < share.first || index >= share.last) {
        continue;
      }
      const ParameterView& view = layout_.view(i);
      const std::int64_t begin = std::max(share.begin - view.offset, std::int64_t{0});
      const std::int64_t end = std::min(share.end - view.offset, view.numel);
      owned_[i].by.push_back({share.rank, begin, end - begin});
      if (share.rank == replicas->rank()) {
        owned_[i].is_mine = true;
        owned_[i].mine = owned_[i].by.back();
      }
    }
  }
  for (std::size_t buffer = 0; buffer < masters_.size(); ++buffer) {
    const at::Tensor& whole = wholes[buffer];
    masters_[buffer] = whole;
    if (!whole.defined() || !shares) {
      continue;
    }
    std::int64_t numel = 0;
    for (const Share& share : shares_of(buffer)) {
      numel += share.end - share.begin;
    }
    masters_[buffer] = zeros_on_huge_pages(numel, whole.options());
    for (const Share& share : shares_of(buffer)) {
      const std::int64_t length = share.end - share.begin;
      range_of_masters(buffer, share.begin, length).copy_(whole.narrow(0, share.begin, length));
    }
  }
}

std::vector<Share> StepPlace::shares_of(std::size_t buffer) const {
  if (!gradients_.is_shared()) {
    const FlatPacking& packing = layout_.packing(buffer);
    return {{buffer, 0, 0, packing.views().size(), 0, packing.numel()}};
  }
  std::vector<Share> mine;
  for (const Share& share : gradients_.replicas()->shares()) {
    if (share.dtype == buffer && share.rank == gradients_.replicas()->rank()) {
      mine.push_back(share);
    }
  }
  return mine;
}

at::Tensor StepPlace::range_of_masters(std::size_t buffer, std::int64_t begin,
                                       std::int64_t numel) const {
  if (!masters_[buffer].defined()) {
    return {};
  }
  std::int64_t before = 0;  // shares lie one after the other
  for (const Share& share : shares_of(buffer)) {
    if (share.begin <= begin && begin + numel <= share.end) {
      return masters_[buffer].narrow(0, before + begin - share.begin, numel);
    }
    before += share.end - share.begin;
  }
  PD2_ASSERT(false, "elements from ", begin, " on are another replica's");
  return {};
}

StepPlace::Elements StepPlace::elements(std::size_t parameter) const {
  return owned_.empty() ? Elements{0, 0, layout_.view(parameter).numel} : owned_.at(parameter).mine;
}

std::vector<StepPlace::Elements> StepPlace::owners(std::size_t parameter) const {
  return owned_.empty() ? std::vector{elements(parameter)} : owned_.at(parameter).by;
}

at::Tensor StepPlace::kept_master(std::size_t parameter) const {
  const std::size_t buffer = layout_.place(parameter).buffer;
  if (!masters_[buffer].defined() || !owns(parameter)) {
    return {};
  }
  const ParameterView& view = layout_.view(parameter);
  const auto [rank, begin, numel] = elements(parameter);
  const at::Tensor kept = range_of_masters(buffer, view.offset + begin, numel);
  return is_whole(parameter) ? kept.as_strided(view.sizes, view.strides) : kept;
}

at::Tensor StepPlace::mine(std::size_t parameter, const at::Tensor& whole) const {
  const auto [rank, begin, numel] = elements(parameter);
  return whole.as_strided({numel}, {1}, whole.storage_offset() + begin);
}

at::Tensor StepPlace::whole_buffer(std::size_t buffer) const {
  const at::Tensor whole = layout_.packing(buffer).allocate(masters_[buffer].scalar_type());
  for (const Share& share : shares_of(buffer)) {
    const std::int64_t length = share.end - share.begin;
    whole.narrow(0, share.begin, length).copy_(range_of_masters(buffer, share.begin, length));
  }
  return whole;
}

// ---------------------------------------------------------------- steps

std::vector<Share> StepPlace::runs() const {
  std::vector<Share> runs;
  for (std::size_t buffer = 0; buffer < masters_.size() && !host_; ++buffer) {
    const std::vector<Share> of_buffer = shares_of(buffer);
    runs.insert(runs.end(), of_buffer.begin(), of_buffer.end());
  }
  for (std::size_t i = 0; host_ && i < host_->buckets().size(); ++i) {
    const HostMirror::Bucket& each = host_->buckets()[i];
    runs.push_back({each.dtype, 0, each.first, each.last, each.begin, each.end, i});
  }
  return runs;
}

void StepPlace::set_optimizers(const std::vector<OptimizerGroups>& optimizers,
                               bool keeps_bfloat16) {
  fused_.clear();
  stepped_.assign(layout_.num_parameters(), {});
  for (const OptimizerGroups& groups : optimizers) {
    PD2_ASSERT(groups.of_parameter.size() == stepped_.size(), "a group for each parameter");
    for (const Share& run : runs()) {
      add_fused(groups, run, keeps_bfloat16);
    }
  }
  std::ranges::stable_sort(fused_, {}, [](const Fused& fused) { return fused.run.bucket; });
}

void StepPlace::add_fused(const OptimizerGroups& groups, const Share& run, bool keeps_bfloat16) {
  Fused fused{.run = run, .members = {}, .optimizer = nullptr, .master = {}};
  std::vector<ParameterSlice> slices;
  std::vector<std::size_t> parameters;
  for (std::size_t i = 0; i < stepped_.size(); ++i) {  // in the order of their offsets
    const auto [buffer, index] = layout_.place(i);
    if (buffer == run.dtype && groups.of_parameter[i] >= 0 && run.first <= index &&
        index < run.last) {
      const auto [rank, first, count] = elements(i);
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
  fused.optimizer = std::make_unique<FusedOptimizer>(
      groups.kind, std::move(slices), flat, keeps_bfloat16 && flat.scalar_type() != at::kDouble);
  fused.master = range_of_masters(run.dtype, run.begin, numel);
  for (std::size_t index = 0; index < parameters.size(); ++index) {
    Stepped& stepped = stepped_[parameters[index]];
    PD2_ASSERT(stepped.by == nullptr, "parameter ", parameters[index], " in two optimizers");
    stepped = {fused.optimizer.get(), index};
  }
  fused_.push_back(std::move(fused));
}

bool StepPlace::steps_all() const {
  for (std::size_t i = 0; i < stepped_.size(); ++i) {
    if (owns(i) && !is_fused(i)) {
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
    host_->take_changes(read, masters_);
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
      if (owns(i) && !is_fused(i)) {
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
  for (std::size_t buffer = 0; buffer < masters_.size() && to != from; ++buffer) {
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
  if (!is_whole(parameter)) {
    return flat.as_strided({elements(parameter).numel}, {1}, begin);
  }
  return flat.as_strided(view.sizes, view.strides, begin);
}

void StepPlace::fill_state(const at::Tensor& state, std::size_t parameter,
                           const at::Tensor& value) const {
  if (is_whole(parameter) || value.numel() == state.numel()) {
    state.copy_(value);
  } else {
    const ParameterView& view = layout_.view(parameter);
    const at::Tensor whole = at::empty_strided(view.sizes, view.strides, state.options());
    state.copy_(mine(parameter, whole.copy_(value)));
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

std::int64_t StepPlace::state_bytes() const {
  std::int64_t bytes = 0;
  for (const Fused& fused : fused_) {
    bytes += fused.optimizer->state_bytes();
  }
  return bytes;
}

std::int64_t StepPlace::state_padding_bytes() const {
  std::int64_t bytes = 0;
  for (const Fused& fused : fused_) {
    bytes += fused.optimizer->state_padding_bytes();
  }
  return bytes;
}

}  // namespace pd2
