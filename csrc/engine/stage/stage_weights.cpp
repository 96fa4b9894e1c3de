// The weights and masters of a stage, and its bytes.
#include "engine/stage/stage.h"
#include "engine/weights/split_master.h"

#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <iterator>

namespace pd2 {

at::Tensor Stage::weight(int slot, std::size_t parameter) const {
  const Place& place = places_.at(parameter);
  return packings_[place.buffer]->view(slots_.at(slot)[place.buffer], place.index);
}

at::Tensor Stage::master(int slot, std::size_t parameter) const {
  const Place& place = places_.at(parameter);
  if (!masters_[place.buffer].defined()) {
    return weight(slot, parameter);
  }
  if (host_) {
    host_->take_changes(slots_.at(slot), masters_);
  }
  const at::Tensor kept = kept_master(parameter);
  const at::Tensor newest =
      host_ ? host_->weight(place.buffer, place.index) : weight(slot, parameter);
  if (kept.defined() && is_whole(parameter)) {
    return has_split_master(parameter) ? join_master(newest, kept) : kept;
  }
  const at::Tensor rounded = newest.to(at::kFloat);
  if (kept.defined()) {
    mine(parameter, rounded)
        .copy_(has_split_master(parameter) ? join_master(mine(parameter, newest), kept) : kept);
  }
  return rounded;
}

bool Stage::has_split_master(std::size_t parameter) const {
  const at::Tensor& flat = masters_[places_.at(parameter).buffer];
  return flat.defined() && flat.scalar_type() == at::kShort;
}

bool Stage::hides_master(std::size_t parameter) const {
  const bool has_master = masters_[places_.at(parameter).buffer].defined();
  return has_split_master(parameter) || (has_master && (host_ || is_shared()));
}

std::vector<at::Tensor> Stage::master_buffers() const {
  std::vector<at::Tensor> buffers;
  if (!is_shared()) {
    std::ranges::copy_if(masters_, std::back_inserter(buffers), &at::Tensor::defined);
  }
  return buffers;
}

void Stage::round_masters(int slot) {
  for (std::size_t buffer = 0; buffer < packings_.size() && !host_ && !is_shared(); ++buffer) {
    const at::Tensor& master = masters_[buffer];
    if (master.defined() && master.scalar_type() == at::kFloat) {
      slots_.at(slot)[buffer].narrow(0, 0, master.numel()).copy_(master);  // without the flags
    }
  }
}

void Stage::set_master(std::size_t parameter, const at::Tensor& value) {
  const Place& place = places_.at(parameter);
  const at::Tensor newest = weight(versions_.slot(versions_.newest()), parameter);
  const at::Tensor weight = host_ ? host_->weight(place.buffer, place.index) : newest;
  at::Tensor kept = kept_master(parameter);
  const at::Tensor part = kept.defined() && !is_whole(parameter) ? kept : at::Tensor();
  if (!kept.defined() || part.defined()) {  // another replica's, whose rounding is here
    kept = at::empty_like(weight, masters_[place.buffer].options());
  }
  if (has_split_master(parameter)) {
    split_master(value.to(kept.device()), weight, kept);
  } else {
    kept.copy_(value);
    weight.copy_(kept);
  }
  if (part.defined()) {
    part.copy_(mine(parameter, kept));
  }
  if (host_) {
    newest.copy_(weight);
  }
}

void Stage::restart_delay() {
  versions_.reset();
  for (std::size_t buffer = 0; buffer < packings_.size() && host_; ++buffer) {
    host_->take_weights(buffer, slots_[versions_.slot(versions_.newest())][buffer]);
  }
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
      std::int64_t numel = 0;
      for (std::size_t i = 0; i < places_.size(); ++i) {
        numel += places_[i].buffer == buffer ? elements(i).numel : 0;
      }
      const auto size = static_cast<std::int64_t>(masters_[buffer].element_size());
      bytes.masters += numel * size;
      bytes.padding += (masters_[buffer].numel() - numel) * size;
    }
    const std::int64_t num_gradients = has_two_gradients_ ? 2 : 1;
    bytes.gradients += num_gradients * packing.parameter_numel() * gradient_size;
    bytes.kept_gradients += gradients_[buffer]->most_kept_bytes();
    bytes.padding +=
        num_versions_ * (slots_.front()[buffer].numel() - packing.parameter_numel()) * weight_size;
    bytes.padding += num_gradients * (flat.numel() - packing.parameter_numel()) * gradient_size;
  }
  for (const Fused& fused : optimizers_) {
    bytes.optimizer_state += fused.optimizer->state_bytes();
    bytes.padding += fused.optimizer->state_padding_bytes();
  }
  bytes.replica_sums = replicas_ ? replicas_->bytes() : 0;
  if (host_) {
    bytes.host_copies = host_->bytes();
    bytes.padding += host_->padding_bytes();
    bytes.on_host = host_->bytes() + host_->padding_bytes();
    for (const at::Tensor& master : master_buffers()) {
      bytes.on_host += static_cast<std::int64_t>(master.nbytes());
    }
    for (const Fused& fused : optimizers_) {
      bytes.on_host += fused.optimizer->state_bytes() + fused.optimizer->state_padding_bytes();
    }
  }
  return bytes;
}

}  // namespace pd2
