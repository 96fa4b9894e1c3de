#include "engine/stage/stage.h"

#include "core/check.h"
#include "engine/channels/wait_for_work.h"
#include "engine/weights/split_master.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>

namespace pd2 {

Stage::Stage(const std::vector<at::Tensor>& parameters, std::vector<std::string> names,
             int num_versions, c10::intrusive_ptr<c10d::ProcessGroup> replicas,
             std::int64_t bucket_bytes, CopySumEnd copies, const StagePrecision& precision,
             bool has_spare)
    : num_versions_(num_versions),
      has_spare_(has_spare && has_slack()),
      versions_(num_versions),
      copies_(std::move(copies)) {
  PD2_ASSERT(!replicas || !copies_.sum, "copies in this process have no group");
  const bool has_flags = replicas || copies_.sum;
  PD2_ASSERT(parameters.size() == names.size(), names.size(), " names for ", parameters.size());
  // By the dtype of the weights and that of what is stepped.
  std::map<std::pair<at::ScalarType, at::ScalarType>, std::vector<std::size_t>> by_dtype;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::ScalarType own = parameters[i].scalar_type();
    const at::ScalarType computed = precision.dtypes.empty() ? own : precision.dtypes.at(i);
    PD2_CHECK(computed == own || own == at::kFloat, "parameter ", names[i], ": ", own,
              ", computed with as ", computed, ": its master must be float32");
    by_dtype[{computed, own}].push_back(i);
  }
  places_.resize(parameters.size());
  const bool can_rotate =
      has_slack() && std::ranges::all_of(by_dtype, [](const auto& of_dtype) {
        return GradAccumulator::dtype(of_dtype.first.first) == of_dtype.first.first;
      });
  slots_.resize(num_versions + (can_rotate ? 1 + (has_spare_ ? 1 : 0) : 0));
  for (const auto& [dtypes, members] : by_dtype) {
    const auto [dtype, own] = dtypes;
    std::vector<at::Tensor> tensors;
    std::vector<std::string> tensor_names;
    for (std::size_t member : members) {
      places_[member] = {packings_.size(), tensors.size()};
      tensors.push_back(parameters[member].detach().to(dtype));
      tensor_names.push_back(names[member]);
    }
    packings_.push_back(std::make_unique<FlatPacking>(tensors));
    const FlatPacking& packing = *packings_.back();
    const std::int64_t num_flags = GradAccumulator::num_flags(packing, has_flags);
    for (auto& slot : slots_) {
      slot.push_back(packing.allocate(dtype, can_rotate ? num_flags : 0));
    }
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      packing.view(slots_.front().back(), i).copy_(tensors[i]);
    }
    at::Tensor& master = masters_.emplace_back();
    if (dtype != own) {
      const bool split = precision.split && dtype == at::kBFloat16;
      master = packing.allocate(split ? at::kShort : own);
      for (std::size_t i = 0; i < members.size(); ++i) {
        if (split) {
          set_split_master(members[i], parameters[members[i]]);
        } else {
          packing.view(master, i).copy_(parameters[members[i]]);
        }
      }
    }
    std::vector<at::Tensor> buffers;
    for (std::size_t slot = 0; slot < slots_.size() && can_rotate; ++slot) {
      buffers.push_back(slots_[slot].back());
    }
    if (!can_rotate) {
      buffers.push_back(packing.allocate(GradAccumulator::dtype(dtype), num_flags));
    }
    gradients_.push_back(
        std::make_unique<GradAccumulator>(packing, std::move(tensor_names), std::move(buffers)));
  }
  if (replicas) {
    replicas_ = std::make_unique<ReplicaSum>(std::move(replicas), bucket_bytes, gradients_);
  }
  arrange(/*reads_first=*/true, /*waits=*/false);
}

std::size_t Stage::gradient_buffer(std::int64_t batch) const {
  if (rotates()) {
    return versions_.slot_to_write(batch + 1);
  }
  const auto after_the_versions = static_cast<std::size_t>(num_versions_);
  const std::size_t first = slots_.size() > after_the_versions ? after_the_versions : 0;
  return first + (has_two_gradients_ ? batch % 2 : 0);
}

void Stage::arrange(bool reads_first, bool waits, const std::function<bool()>& is_stopped) {
  if (replicas_) {
    replicas_->settle(is_stopped);
  }
  const auto can_rotate = slots_.size() > static_cast<std::size_t>(num_versions_);
  const bool rotates = reads_first && can_rotate;
  // A batch may be complete whose update has not been asked for.
  const std::int64_t newest = versions_.newest();
  const int from = versions_.slot(newest);
  const std::size_t gradients = gradient_buffer(newest);
  const int num_slots = rotates ? this->num_slots() : num_versions_;
  if (num_slots != versions_.num_slots()) {
    versions_ = WeightStore(num_slots, newest);
  } else if (reads_first != reads_first_) {
    versions_.reset();  // as on stages of other dtypes
  }
  reads_first_ = reads_first;
  const bool had_two_gradients = std::exchange(
      has_two_gradients_, (waits || is_tied() || has_spare_) && has_slack() && !rotates);
  const bool is_there = can_rotate && has_spare_;  // the second one
  const int to = versions_.slot(newest);
  for (std::size_t buffer = 0; buffer < packings_.size(); ++buffer) {
    GradAccumulator& accumulator = *gradients_[buffer];
    if (has_two_gradients_ && !had_two_gradients && !is_there) {
      accumulator.add_buffer();
    }
    const at::Tensor weights = from == to ? slots_[to][buffer] : slots_[from][buffer].clone();
    accumulator.move(gradients, gradient_buffer(newest));
    if (from != to) {
      slots_[to][buffer].copy_(weights);
    }
    if (had_two_gradients && !has_two_gradients_ && !is_there) {
      accumulator.drop_last_buffer();
    }
  }
}

at::Tensor Stage::weight(int slot, std::size_t parameter) const {
  const Place& place = places_.at(parameter);
  return packings_[place.buffer]->view(slots_.at(slot)[place.buffer], place.index);
}

at::Tensor Stage::master(int slot, std::size_t parameter) const {
  const Place& place = places_.at(parameter);
  const at::Tensor& flat = masters_[place.buffer];
  if (!flat.defined()) {
    return weight(slot, parameter);
  }
  const at::Tensor kept = packings_[place.buffer]->view(flat, place.index);
  if (!has_split_master(parameter)) {
    return kept;
  }
  return join_master(weight(slot, parameter), kept);
}

bool Stage::has_split_master(std::size_t parameter) const {
  const at::Tensor& flat = masters_[places_.at(parameter).buffer];
  return flat.defined() && flat.scalar_type() == at::kShort;
}

std::vector<at::Tensor> Stage::master_buffers() const {
  std::vector<at::Tensor> buffers;
  std::ranges::copy_if(masters_, std::back_inserter(buffers), &at::Tensor::defined);
  return buffers;
}

void Stage::round_masters(int slot) {
  for (std::size_t buffer = 0; buffer < packings_.size(); ++buffer) {
    const at::Tensor& master = masters_[buffer];
    if (master.defined() && master.scalar_type() == at::kFloat) {
      slots_.at(slot)[buffer].copy_(master);
    }
  }
}

void Stage::set_split_master(std::size_t parameter, const at::Tensor& value) {
  const Place& place = places_.at(parameter);
  const at::Tensor remainder = packings_[place.buffer]->view(masters_[place.buffer], place.index);
  split_master(value, weight(versions_.slot(versions_.newest()), parameter), remainder);
}

void Stage::load_versions(std::int64_t oldest, std::int64_t newest) {
  PD2_CHECK(newest - oldest < num_versions_, "versions ", oldest, " to ", newest,
            " are to be loaded: the stage keeps ", num_versions_);
  versions_.load(oldest, newest);
  newest_batch_ = -1;  // batches are counted from here
}

at::Tensor Stage::gradient(std::size_t parameter) const {
  const Place& place = places_.at(parameter);
  return gradients_[place.buffer]->view(update_.gradients, place.index);
}

bool Stage::has_gradient(std::size_t parameter) const {
  const Place& place = places_.at(parameter);
  return gradients_[place.buffer]->has_gradient(update_.gradients)[place.index];
}

void Stage::scale_gradients(const at::Tensor& factor) {
  for (std::size_t i = 0; i < places_.size(); ++i) {
    if (has_gradient(i)) {
      at::Tensor gradient = this->gradient(i);
      gradient.mul_(factor.to(gradient.device()));
    }
  }
}

void Stage::attach(std::size_t parameter, const at::Tensor& slot_parameter) {
  const Place& place = places_.at(parameter);
  gradients_[place.buffer]->attach(place.index, slot_parameter);
}

void Stage::begin_batch(std::int64_t batch) {
  const std::size_t buffer = gradient_buffer(batch);
  newest_batch_ = batch;
  for (auto& gradient : gradients_) {
    gradient->begin_batch(buffer);
  }
}

void Stage::begin_microbatch(std::int64_t batch, bool is_last) {
  if (replicas_) {
    replicas_->begin_microbatch(gradient_buffer(batch), is_last);
  }
}

void Stage::begin_update(std::int64_t batch) {
  const std::int64_t newest = versions_.newest();
  PD2_ASSERT(newest == batch, "batch ", batch, " updates version ", newest);
  update_ = {versions_.slot(newest), versions_.begin_next(), gradient_buffer(batch), {}};
  if (replicas_) {
    update_.sum = replicas_->end_batch(update_.gradients);
  }
}

void Stage::begin_nothing(std::int64_t batch, bool replicas_know) {
  update_ = {};
  if (replicas_ && !replicas_know) {
    newest_batch_ = std::max(newest_batch_, batch);  // the sum is written there
    update_.sum = replicas_->end_batch(gradient_buffer(batch));
  }
}

void Stage::let_sums_end(const std::function<bool()>& is_stopped) {
  for (const auto& work : std::exchange(update_.sum.works, {})) {
    wait_for_work(*work, replicas_->timeout(), !on_cuda(), is_stopped);
  }
}

void Stage::hold_gradients(std::vector<HeldGradient>* where) {
  for (auto& gradient : gradients_) {
    gradient->hold(where);
  }
}

void Stage::reduce(const std::function<bool()>& is_stopped) {
  auto works = std::exchange(update_.sum.works, {});
  for (std::size_t buffer = 0; buffer < gradients_.size() && copies_.sum; ++buffer) {
    gradients_[buffer]->fill_missing(update_.gradients);
    works.push_back(
        copies_.sum->add(copies_.copy, buffer, gradients_[buffer]->flat(update_.gradients)));
  }
  // A thread of the host adds copies up, also those of a device.
  const bool on_host = !on_cuda() || copies_.sum;
  const double timeout = replicas_ ? replicas_->timeout() : timeout_of(nullptr);
  for (const auto& work : works) {
    wait_for_work(*work, timeout, on_host, is_stopped);
  }
  if ((replicas_ && !update_.sum.is_settled) || copies_.sum) {
    for (auto& gradient : gradients_) {
      gradient->read_flags(update_.gradients);
    }
  }
}

void Stage::tie(std::shared_ptr<TiedSum> sum, std::size_t copy,
                std::vector<std::size_t> parameters) {
  ties_.push_back({std::move(sum), copy, std::move(parameters)});
}

void Stage::sum_ties(std::int64_t batch, const std::function<bool()>& is_stopped) {
  for (const Tie& tie : ties_) {
    std::vector<TiedGradient> gradients;
    for (const std::size_t parameter : tie.parameters) {
      gradients.push_back({gradient(parameter), has_gradient(parameter)});
    }
    tie.sum->add(batch, tie.copy, gradients, is_stopped);
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      const Place& place = places_[tie.parameters[i]];
      gradients_[place.buffer]->set_has_gradient(update_.gradients, place.index,
                                                 gradients[i].exists);
    }
  }
}

void Stage::drop_connections() {
  if (replicas_) {
    replicas_->drop_connections();
  }
  copies_.sum.reset();
  for (const Tie& tie : ties_) {
    tie.sum->drop_connections();
  }
}

void Stage::set_optimizers(const std::vector<OptimizerGroups>& optimizers) {
  optimizers_.clear();
  stepped_.assign(places_.size(), {});
  for (const OptimizerGroups& groups : optimizers) {
    PD2_ASSERT(groups.of_parameter.size() == places_.size(), "a group for each parameter");
    for (std::size_t buffer = 0; buffer < packings_.size(); ++buffer) {
      Fused fused{.buffer = buffer, .members = {}, .optimizer = nullptr};
      std::vector<ParameterSlice> slices;
      std::vector<std::size_t> parameters;
      for (std::size_t i = 0; i < places_.size(); ++i) {  // in the order of their offsets
        if (places_[i].buffer == buffer && groups.of_parameter[i] >= 0) {
          const ParameterView& view = packings_[buffer]->views()[places_[i].index];
          fused.members.push_back(places_[i].index);
          slices.push_back({view.offset, view.numel, groups.of_parameter[i]});
          parameters.push_back(i);
        }
      }
      if (slices.empty()) {
        continue;
      }
      fused.optimizer = std::make_unique<FusedOptimizer>(groups.kind, std::move(slices),
                                                         gradients_[buffer]->gradients(0));
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
  const int from = update_.from, to = update_.to;
  const std::size_t gradients = update_.gradients;
  for (Fused& fused : optimizers_) {
    const std::vector<bool>& has_gradient = gradients_[fused.buffer]->has_gradient(gradients);
    std::vector<bool> of_members;
    for (std::size_t member : fused.members) {
      of_members.push_back(has_gradient[member]);
    }
    fused.optimizer->step(slots_[from][fused.buffer],
                          gradients_[fused.buffer]->gradients(gradients), slots_[to][fused.buffer],
                          groups, of_members, masters_[fused.buffer]);
  }
  if (to != from && optimizers_.empty()) {
    PD2_ASSERT(!rotates() || places_.empty(),
               "the gradients are where the weights would be copied");
    repeat_newest();
  } else if (to != from) {
    for (std::size_t i = 0; i < places_.size(); ++i) {
      if (stepped_[i].by == nullptr) {
        PD2_ASSERT(!rotates(), "the gradient is where the weight would be copied");
        weight(to, i).copy_(weight(from, i));
      }
    }
  }
  return to;
}

void Stage::repeat_newest() {
  const int from = update_.from, to = update_.to;
  for (std::size_t buffer = 0; buffer < packings_.size() && to != from; ++buffer) {
    slots_[to][buffer].copy_(slots_[from][buffer]);
  }
}

at::Tensor Stage::optimizer_state(std::string_view name, std::size_t parameter) const {
  const Stepped& stepped = this->stepped(parameter);
  const at::Tensor flat = stepped.by->state(name);
  if (!flat.defined()) {
    return {};
  }
  const Place& place = places_.at(parameter);
  const ParameterView& view = packings_[place.buffer]->views()[place.index];
  return flat.as_strided(view.sizes, view.strides,
                         flat.storage_offset() + stepped.by->state_offset(stepped.index));
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
  optimizer_state(name, parameter).copy_(value);
  stepped.by->mark_loaded(stepped.index);
}

void Stage::set_step_count(std::size_t parameter, std::int64_t count) {
  const Stepped& stepped = this->stepped(parameter);
  stepped.by->set_step_count(stepped.index, count);
}

StageBytes Stage::bytes() const {
  StageBytes bytes;
  for (std::size_t buffer = 0; buffer < packings_.size(); ++buffer) {
    const FlatPacking& packing = *packings_[buffer];
    const auto weight_size = static_cast<std::int64_t>(c10::elementSize(packing.dtype()));
    const at::Tensor& flat = gradients_[buffer]->flat(0);
    const auto gradient_size = static_cast<std::int64_t>(flat.element_size());
    bytes.weights += num_versions_ * packing.parameter_numel() * weight_size;
    if (masters_[buffer].defined()) {
      const auto size = static_cast<std::int64_t>(masters_[buffer].element_size());
      bytes.masters += packing.parameter_numel() * size;
      bytes.padding += (packing.numel() - packing.parameter_numel()) * size;
    }
    const std::int64_t num_gradients = has_two_gradients_ || has_spare_ ? 2 : 1;
    bytes.gradients += num_gradients * packing.parameter_numel() * gradient_size;
    bytes.padding +=
        num_versions_ * (slots_.front()[buffer].numel() - packing.parameter_numel()) * weight_size;
    bytes.padding += num_gradients * (flat.numel() - packing.parameter_numel()) * gradient_size;
  }
  for (const Fused& fused : optimizers_) {
    bytes.optimizer_state += fused.optimizer->state_bytes();
    bytes.padding += fused.optimizer->state_padding_bytes();
  }
  return bytes;
}

}  // namespace pd2
