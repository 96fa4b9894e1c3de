#include "engine/stage/gradient_path.h"

#include "core/check.h"
#include "engine/channels/wait_for_work.h"

namespace pd2 {

GradientPath::GradientPath(const StageLayout& layout, const Slots& slots,
                           const StageStreams& streams, GradientPathOptions options)
    : layout_(layout), device_(streams.device) {
  const bool sums = !std::holds_alternative<std::monostate>(options.others);
  for (std::size_t dtype = 0; dtype < layout.buffers().size(); ++dtype) {
    const auto& [packing, names, of_gradients, master] = layout.buffers()[dtype];
    std::vector<at::Tensor> buffers;
    for (int slot = 0; slot < slots.num_slots() && slots.can_rotate(); ++slot) {
      buffers.push_back(slots.flat(slot)[dtype]);
    }
    if (!slots.can_rotate()) {
      buffers.push_back(packing.allocate(of_gradients, GradAccumulator::num_flags(packing, sums)));
    }
    gradients_.push_back(std::make_unique<GradAccumulator>(packing, names, std::move(buffers)));
  }
  if (options.to_host) {
    host_ = std::make_unique<HostMirror>(streams, gradients_, options.bucket_bytes, !sums);
  }
  if (auto* replicas = std::get_if<Replicas>(&options.others)) {
    others_ = std::make_unique<ReplicaSum>(std::move(*replicas), options.bucket_bytes, gradients_,
                                           streams.update);
  } else if (auto* copies = std::get_if<CopySumEnd>(&options.others)) {
    others_ = std::move(*copies);
  }
}

void GradientPath::attach(std::size_t parameter, const at::Tensor& slot_parameter) {
  const StageLayout::Place& place = layout_.place(parameter);
  gradients_[place.buffer]->attach(place.index, slot_parameter);
}

void GradientPath::tie(std::shared_ptr<TiedSum> sum, std::size_t copy,
                       std::vector<std::size_t> parameters) {
  ties_.push_back({std::move(sum), copy, std::move(parameters)});
}

void GradientPath::begin_batch(std::size_t buffer) {
  for (const auto& gradient : gradients_) {
    gradient->begin_batch(buffer);
  }
}

void GradientPath::begin_microbatch(std::size_t buffer, bool is_last) {
  if (replicas()) {
    replicas()->begin_microbatch(buffer, is_last);
  }
  if (host_) {
    host_->begin_microbatch(buffer, is_last);
  }
}

GradientPath::State GradientPath::state() const {
  State state;
  for (const auto& gradient : gradients_) {
    state.push_back(gradient->state());
  }
  return state;
}

void GradientPath::set_state(const State& state) {
  for (std::size_t dtype = 0; dtype < gradients_.size(); ++dtype) {
    gradients_[dtype]->set_added(state[dtype].second);
  }
  if (replicas()) {
    replicas()->forget_microbatch();
  }
  if (host_) {
    host_->forget_microbatch();
  }
}

void GradientPath::hold(std::vector<HeldGradient>* where) {
  for (const auto& gradient : gradients_) {
    gradient->hold(where);
  }
}

void GradientPath::move(std::size_t count, std::size_t from, std::size_t to) {
  for (const auto& gradient : gradients_) {
    gradient->move(count, from, to);
  }
}

void GradientPath::share(bool shares, const std::vector<bool>& may_cut, bool norms) {
  std::vector<ReplicaSum::Range> wanted;
  const auto want = [&](std::size_t parameter, bool is_for_all) {
    const ParameterView& view = layout_.view(parameter);
    wanted.push_back(
        {layout_.place(parameter).buffer, view.offset, view.offset + view.numel, is_for_all});
  };
  std::vector<bool> is_tied(layout_.num_parameters(), false);
  for (const Tie& tie : ties_) {  // whose sum each replica makes of its own stages' gradients
    for (const std::size_t parameter : tie.parameters) {
      is_tied[parameter] = true;
      want(parameter, /*is_for_all=*/true);
    }
  }
  MayCut cuts(shares ? gradients_.size() : 0);
  for (std::size_t i = 0; i < layout_.num_parameters() && shares; ++i) {
    cuts[layout_.place(i).buffer].push_back(may_cut.at(i));
    if (may_cut[i] && norms && !is_tied[i]) {
      want(i, /*is_for_all=*/false);
    }
  }
  replicas()->share(shares, cuts, wanted);
}

void GradientPath::begin_update(std::size_t buffer) {
  update_ = {buffer, replicas() ? replicas()->end_batch(buffer) : nullptr};
  if (host_) {
    host_->begin_update(is_summed());
    if (!is_summed()) {
      host_->fetch_rest(buffer);
    }
  }
}

void GradientPath::begin_nothing(std::optional<std::size_t> buffer) {
  update_ = {};
  if (host_) {
    host_->begin_update(/*sums=*/false);
  }
  if (buffer) {
    update_ = {*buffer, replicas()->end_batch(*buffer)};
  }
}

void GradientPath::reduce(const IsStopped& is_stopped, std::optional<double> unscaling) {
  if (std::exchange(update_.is_reduced, true)) {
    return;
  }
  const ReplicaSum::UnderWay of_replicas = update_.sum;
  if (!is_shared()) {
    update_.sum = nullptr;
  }
  if (of_replicas && has_hook()) {
    replicas()->call_hook(*of_replicas, unscaling, is_stopped);
  } else if (of_replicas) {
    replicas()->finish(*of_replicas, is_stopped, [this](const GradientBuckets::Bucket& bucket) {
      if (host_) {
        host_->fetch(bucket, update_.buffer);
      }
    });
  }
  const auto* copies = std::get_if<CopySumEnd>(&others_);
  if (copies) {
    sum_copies(*copies, is_stopped);
  }
  if ((of_replicas && !of_replicas->is_settled) || copies) {
    for (const auto& gradient : gradients_) {
      gradient->read_flags(update_.buffer);
    }
  }
  if (host_ && is_summed()) {
    host_->fetch_rest(update_.buffer);
  }
}

void GradientPath::sum_copies(const CopySumEnd& copies, const IsStopped& is_stopped) {
  std::vector<c10::intrusive_ptr<CopySum::Sum>> sums;
  for (std::size_t dtype = 0; dtype < gradients_.size(); ++dtype) {
    gradients_[dtype]->fill_missing(update_.buffer);
    sums.push_back(copies.sum->add(copies.copy, dtype, gradients_[dtype]->flat(update_.buffer)));
  }
  for (const auto& sum : sums) {
    // A thread of the host adds copies up, also those of a device.
    wait_for_work(*sum, timeout_of(nullptr), /*on_host=*/true, is_stopped);
    sum->added().hold_back(stream_here(device_));
  }
}

void GradientPath::sum_ties(std::int64_t batch, const IsStopped& is_stopped) {
  for (const Tie& tie : ties_) {
    std::vector<TiedGradient> gradients;
    for (const std::size_t parameter : tie.parameters) {
      gradients.push_back({gradient(parameter), has_gradient(parameter)});
    }
    tie.sum->add(batch, tie.copy, gradients, is_stopped);
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      const StageLayout::Place& place = layout_.place(tie.parameters[i]);
      if (host_) {
        host_->has_gradient(place.buffer)[place.index] = gradients[i].exists;
      } else {
        gradients_[place.buffer]->set_has_gradient(update_.buffer, place.index,
                                                   gradients[i].exists);
      }
    }
  }
}

void GradientPath::let_sums_end(const IsStopped& is_stopped) {
  if (const auto sum = std::exchange(update_.sum, nullptr)) {
    // Nobody steps: all learn before their sums end that the batch is discarded.
    replicas()->let_end(*sum, is_stopped, update_.is_reduced);
  }
  if (host_) {
    host_->release();
  }
}

void GradientPath::exchange_shares(const std::vector<at::Tensor>& stepped,
                                   const IsStopped& is_stopped) {
  if (const auto sum = std::exchange(update_.sum, nullptr)) {
    replicas()->gather(sum.get(), stepped, is_stopped);
  }
}

void GradientPath::end_update() {
  if (host_) {
    host_->end_update();
  }
}

at::Tensor GradientPath::gradient(std::size_t parameter) const {
  const auto [dtype, index] = layout_.place(parameter);
  return host_ ? host_->gradient(dtype, index) : gradients_[dtype]->view(update_.buffer, index);
}

bool GradientPath::has_gradient(std::size_t parameter) const {
  const auto [dtype, index] = layout_.place(parameter);
  return has_gradients(dtype)[index];
}

const at::Tensor& GradientPath::flat(std::size_t dtype) const {
  return host_ ? host_->gradients(dtype) : gradients_[dtype]->flat(update_.buffer);
}

const std::vector<bool>& GradientPath::has_gradients(std::size_t dtype) const {
  return host_ ? host_->has_gradient(dtype) : gradients_[dtype]->has_gradient(update_.buffer);
}

void GradientPath::drop_connections() {
  if (replicas()) {
    replicas()->drop_connections();
  } else if (auto* copies = std::get_if<CopySumEnd>(&others_)) {
    copies->sum.reset();
  }
  for (const Tie& tie : ties_) {
    tie.sum->drop_connections();
  }
}

}  // namespace pd2
