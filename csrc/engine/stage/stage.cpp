#include "engine/stage/stage.h"

#include "core/check.h"
#include "engine/channels/wait_for_work.h"

#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>

namespace pd2 {

Stage::Stage(const std::vector<at::Tensor>& parameters, std::vector<std::string> names,
             int num_versions, Replicas replicas, std::int64_t bucket_bytes, CopySumEnd copies,
             const StagePrecision& precision, std::shared_ptr<const StageStreams> streams,
             bool steps_on_host)
    : streams_(streams ? std::move(streams) : std::make_shared<const StageStreams>(at::kCPU)),
      num_versions_(num_versions),
      versions_(num_versions),
      copies_(std::move(copies)) {
  PD2_ASSERT(!replicas || !copies_.sum, "copies in this process have no group");
  const bool sums = replicas || copies_.sum;
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
  const auto gradient_dtype = [&](const std::pair<at::ScalarType, at::ScalarType>& dtypes) {
    const bool has_master = dtypes.first != dtypes.second;
    return GradAccumulator::dtype(dtypes.first, has_master ? precision.gradients : std::nullopt);
  };
  const bool can_rotate = has_slack() && std::ranges::all_of(by_dtype, [&](const auto& of_dtype) {
                            return gradient_dtype(of_dtype.first) == of_dtype.first.first;
                          });
  slots_.resize(num_versions + (can_rotate ? 1 : 0));
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
    const std::int64_t num_flags = GradAccumulator::num_flags(packing, sums);
    for (auto& slot : slots_) {
      slot.push_back(packing.allocate(dtype, can_rotate ? num_flags : 0));
    }
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      packing.view(slots_.front().back(), i).copy_(tensors[i]);
    }
    at::Tensor& master = masters_.emplace_back();
    if (dtype != own) {
      const bool split = precision.split && dtype == at::kBFloat16;
      const at::ScalarType kept = split ? at::kShort : own;
      master = steps_on_host
                   ? zeros_on_huge_pages(packing.numel(), at::device(at::kCPU).dtype(kept))
                   : packing.allocate(kept);
    }
    std::vector<at::Tensor> buffers;
    for (std::size_t slot = 0; slot < slots_.size() && can_rotate; ++slot) {
      buffers.push_back(slots_[slot].back());
    }
    if (!can_rotate) {
      buffers.push_back(packing.allocate(gradient_dtype(dtypes), num_flags));
    }
    gradients_.push_back(
        std::make_unique<GradAccumulator>(packing, std::move(tensor_names), std::move(buffers)));
  }
  if (steps_on_host) {
    host_ = std::make_unique<HostMirror>(*streams_, gradients_, bucket_bytes, !sums);
    restart_delay();
  }
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (masters_[places_[i].buffer].defined()) {
      set_master(i, parameters[i]);
    }
  }
  if (replicas) {
    replicas_ = std::make_unique<ReplicaSum>(std::move(replicas), bucket_bytes, gradients_,
                                             streams_->update);
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
  const bool had_two_gradients =
      std::exchange(has_two_gradients_, (waits || is_tied()) && has_slack() && !rotates && !host_);
  const int to = versions_.slot(newest);
  for (std::size_t buffer = 0; buffer < packings_.size(); ++buffer) {
    GradAccumulator& accumulator = *gradients_[buffer];
    if (has_two_gradients_ && !had_two_gradients) {
      accumulator.add_buffer();
    }
    const at::Tensor weights = from == to ? slots_[to][buffer] : slots_[from][buffer].clone();
    accumulator.move(gradients, gradient_buffer(newest));
    if (from != to) {
      slots_[to][buffer].copy_(weights);
    }
    if (had_two_gradients && !has_two_gradients_) {
      accumulator.drop_last_buffer();
    }
  }
}

void Stage::load_versions(std::int64_t oldest, std::int64_t newest) {
  PD2_CHECK(newest - oldest < num_versions_, "versions ", oldest, " to ", newest,
            " are to be loaded: the stage keeps ", num_versions_);
  versions_.load(oldest, newest);
}

at::Tensor Stage::gradient(std::size_t parameter) const {
  const Place& place = places_.at(parameter);
  if (host_) {
    return host_->gradient(place.buffer, place.index);
  }
  return gradients_[place.buffer]->view(update_.gradients, place.index);
}

bool Stage::has_gradient(std::size_t parameter) const {
  const Place& place = places_.at(parameter);
  if (host_) {
    return host_->has_gradient(place.buffer)[place.index];
  }
  return gradients_[place.buffer]->has_gradient(update_.gradients)[place.index];
}

void Stage::scale_gradients(double factor) {
  scale_gradients(at::scalar_tensor(factor, at::kDouble));
}

void Stage::scale_gradients(const at::Tensor& factor) {
  std::vector<at::Tensor> gradients;
  for (std::size_t i = 0; i < places_.size(); ++i) {
    if (owns(i) && has_gradient(i)) {
      at::Tensor mine = gradient(i);
      if (mine.scalar_type() == at::kBFloat16) {  // to which mul_() rounds the factor, too
        mine.copy_(mine.to(at::kFloat).mul_(factor));
      } else {
        gradients.push_back(mine);
      }
    }
  }
  if (!gradients.empty() && factor.is_cpu()) {
    at::_foreach_mul_(gradients, factor.item());
  } else if (!gradients.empty()) {
    at::_foreach_mul_(gradients, factor);
  }
}

void Stage::scale_gradients_in_step(const at::Tensor& factor) {
  bool is_in_step = stepped_.size() == places_.size();
  for (std::size_t i = 0; i < places_.size() && is_in_step; ++i) {
    is_in_step = !owns(i) || !has_gradient(i) ||
                 stepped_[i].by != nullptr;  // else a user's optimizer reads it
  }
  if (is_in_step) {
    update_.factor = factor;
  } else {
    scale_gradients(factor);
  }
}

void Stage::attach(std::size_t parameter, const at::Tensor& slot_parameter) {
  // Autograd gives a leaf's gradients to the stream that is current when its node is made.
  const OnStream guard(streams_->compute);
  const Place& place = places_.at(parameter);
  gradients_[place.buffer]->attach(place.index, slot_parameter);
  // Versions and gradients take turns in its memory. What the engine writes there does not count
  // as a write to the tensor: a recorded forward keeps it over many versions.
  slot_parameter.unsafeGetTensorImpl()->set_version_counter(c10::VariableVersion(0));
}

std::int64_t Stage::version_before_gradients(std::int64_t batch) const {
  if (rotates()) {  // the step that read the version which was there
    return batch + 2 - versions_.num_slots();
  }
  return has_two_gradients_ || host_ ? batch - 1 : batch;
}

void Stage::begin_batch(std::int64_t batch) {
  const std::size_t buffer = gradient_buffer(batch);
  for (auto& gradient : gradients_) {
    gradient->begin_batch(buffer);
  }
}

void Stage::begin_microbatch(std::int64_t batch, bool is_last) {
  if (replicas_) {
    replicas_->begin_microbatch(gradient_buffer(batch), is_last);
  }
  if (host_) {
    host_->begin_microbatch(gradient_buffer(batch), is_last);
  }
}

void Stage::begin_update(std::int64_t batch) {
  const std::int64_t newest = versions_.newest();
  PD2_ASSERT(newest == batch, "batch ", batch, " updates version ", newest);
  update_ = {versions_.slot(newest), versions_.begin_next(), gradient_buffer(batch)};
  if (replicas_) {
    update_.sum = replicas_->end_batch(update_.gradients);
  }
  if (host_) {
    host_->begin_update(is_summed());
    if (!is_summed()) {
      host_->fetch_rest(update_.gradients);
    }
  }
}

void Stage::begin_nothing(std::int64_t batch, bool replicas_know) {
  update_ = {};
  if (host_) {
    host_->begin_update(/*sums=*/false);
  }
  if (replicas_ && !replicas_know) {
    update_.gradients = gradient_buffer(batch);
    update_.sum = replicas_->end_batch(update_.gradients);
  }
}

void Stage::let_sums_end(const std::function<bool()>& is_stopped) {
  if (const auto sum = std::exchange(update_.sum, nullptr)) {
    if (!update_.is_reduced) {
      replicas_->let_end(*sum, is_stopped);
    }
    if (replicas_->is_shared()) {  // others may wait for what they think has been stepped
      update_.sum = sum;
      update_.is_stepped = false;
    }
  }
  if (host_) {
    host_->release();
  }
}

void Stage::reduce(const std::function<bool()>& is_stopped, std::optional<double> unscaling) {
  if (std::exchange(update_.is_reduced, true)) {
    return;
  }
  const ReplicaSum::UnderWay of_replicas = update_.sum;
  if (!is_shared()) {
    update_.sum = nullptr;
  }
  if (of_replicas && has_hook()) {
    replicas_->call_hook(*of_replicas, unscaling, is_stopped);
  } else if (of_replicas) {
    replicas_->finish(*of_replicas, is_stopped, [this](const GradientBuckets::Bucket& bucket) {
      if (host_) {
        host_->fetch(bucket, update_.gradients);
      }
    });
  }
  std::vector<c10::intrusive_ptr<CopySum::Sum>> sums;
  for (std::size_t buffer = 0; buffer < gradients_.size() && copies_.sum; ++buffer) {
    gradients_[buffer]->fill_missing(update_.gradients);
    sums.push_back(
        copies_.sum->add(copies_.copy, buffer, gradients_[buffer]->flat(update_.gradients)));
  }
  for (const auto& sum : sums) {
    // A thread of the host adds copies up, also those of a device.
    wait_for_work(*sum, timeout_of(nullptr), /*on_host=*/true, is_stopped);
    sum->added().hold_back(stream_here(streams_->device));
  }
  if ((of_replicas && !of_replicas->is_settled) || copies_.sum) {
    for (auto& gradient : gradients_) {
      gradient->read_flags(update_.gradients);
    }
  }
  if (host_ && is_summed()) {
    host_->fetch_rest(update_.gradients);
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
      if (host_) {
        host_->has_gradient(place.buffer)[place.index] = gradients[i].exists;
      } else {
        gradients_[place.buffer]->set_has_gradient(update_.gradients, place.index,
                                                   gradients[i].exists);
      }
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

}  // namespace pd2
