#include "engine/stage/stage.h"

#include "core/check.h"

#include <ATen/ops/_foreach_mul.h>

#include <utility>

namespace pd2 {

Stage::Stage(const std::vector<at::Tensor>& parameters, const std::vector<std::string>& names,
             StageOptions options)
    : streams_(options.streams ? std::move(options.streams)
                               : std::make_shared<const StageStreams>(at::kCPU)),
      layout_(parameters, names, options.precision),
      slots_(layout_, parameters, options.num_versions,
             !std::holds_alternative<std::monostate>(options.gradients.others)),
      gradients_(layout_, slots_, *streams_, std::move(options.gradients)),
      masters_(layout_, slots_, gradients_),
      step_place_(layout_, slots_, gradients_, masters_) {
  restart_delay();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (layout_.buffers()[layout_.place(i).buffer].master) {
      masters_.set(i, parameters[i]);
    }
  }
  arrange(/*reads_first=*/true, /*waits=*/false);
}

void Stage::attach(std::size_t parameter, const at::Tensor& slot_parameter) {
  // Autograd gives a leaf's gradients to the stream that is current when its node is made.
  const OnStream guard(streams_->compute);
  gradients_.attach(parameter, slot_parameter);
  // Versions and gradients take turns in its memory. What the engine writes there does not count
  // as a write to the tensor: a recorded forward keeps it over many versions.
  slot_parameter.unsafeGetTensorImpl()->set_version_counter(c10::VariableVersion(0));
}

std::size_t Stage::gradient_buffer(std::int64_t batch) const {
  if (slots_.rotates()) {
    return versions().slot_to_write(batch + 1);
  }
  const std::size_t first = slots_.can_rotate() ? slots_.num_versions() : 0;
  return first + (has_two_gradients_ ? batch % 2 : 0);
}

std::int64_t Stage::version_before_gradients(std::int64_t batch) const {
  if (slots_.rotates()) {  // the step that read the version which was there
    return batch + 2 - versions().num_slots();
  }
  return overlaps() ? batch - 1 : batch;
}

bool Stage::wait_for_gradients_buffer(std::chrono::milliseconds at_most) {
  HostMirror* host = gradients_.host();
  return !host || slots_.rotates() || host->wait_until_released(at_most, streams_->compute);
}

void Stage::arrange(bool reads_first, bool waits, const std::function<bool()>& is_stopped) {
  if (gradients_.replicas()) {
    gradients_.replicas()->settle(is_stopped);
  }
  // A batch may be complete whose update has not been asked for.
  const std::int64_t newest = versions().newest();
  const int from = slots_.newest();
  const std::size_t gradients = gradient_buffer(newest);
  const bool rotates = reads_first && slots_.can_rotate();
  if (rotates != slots_.rotates()) {
    slots_.arrange(rotates);
  } else if (reads_first != reads_first_) {
    versions().reset();  // as on stages of other dtypes
  }
  reads_first_ = reads_first;
  has_two_gradients_ =
      (waits || gradients_.is_tied()) && slots_.has_slack() && !rotates && !gradients_.host();
  const int to = slots_.newest();
  std::vector<at::Tensor> weights;
  for (const at::Tensor& flat : slots_.flat(from)) {
    weights.push_back(from == to ? flat : flat.clone());
  }
  const std::size_t num_buffers = slots_.can_rotate() ? slots_.num_slots() : 1;
  gradients_.move(num_buffers + (has_two_gradients_ ? 1 : 0), gradients, gradient_buffer(newest));
  for (std::size_t buffer = 0; buffer < weights.size() && from != to; ++buffer) {
    slots_.flat(to)[buffer].copy_(weights[buffer]);
  }
}

void Stage::take_back() {
  versions().reset();
  if (gradients_.host()) {
    gradients_.host()->forget();
  }
}

void Stage::restart_delay() {
  versions().reset();
  const std::vector<at::Tensor>& newest = slots_.flat(slots_.newest());
  for (std::size_t buffer = 0; buffer < newest.size() && gradients_.host(); ++buffer) {
    gradients_.host()->take_weights(buffer, newest[buffer]);
  }
}

void Stage::load_versions(std::int64_t oldest, std::int64_t newest) {
  PD2_CHECK(newest - oldest < slots_.num_versions(), "versions ", oldest, " to ", newest,
            " are to be loaded: the stage keeps ", slots_.num_versions());
  versions().load(oldest, newest);
}

void Stage::begin_update(std::int64_t batch) {
  const std::int64_t newest = versions().newest();
  PD2_ASSERT(newest == batch, "batch ", batch, " updates version ", newest);
  update_ = {slots_.newest(), versions().begin_next()};
  gradients_.begin_update(gradient_buffer(batch));
}

void Stage::begin_nothing(std::int64_t batch) {
  // No replica has begun a batch that would read a version which is never made.
  const bool sums = gradients_.replicas() && batch < versions().newest() + slots_.num_versions();
  gradients_.begin_nothing(sums ? std::optional(gradient_buffer(batch)) : std::nullopt);
}

void Stage::scale_gradients(const at::Tensor& factor) {
  std::vector<at::Tensor> gradients;
  for (std::size_t i = 0; i < layout_.num_parameters(); ++i) {
    if (masters_.owns(i) && gradients_.has_gradient(i)) {
      at::Tensor mine = gradients_.gradient(i);
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
  bool is_in_step = step_place_.has_optimizers();
  for (std::size_t i = 0; i < layout_.num_parameters() && is_in_step; ++i) {
    is_in_step = !masters_.owns(i) || !gradients_.has_gradient(i) ||
                 step_place_.is_fused(i);  // else a user's optimizer reads it
  }
  if (is_in_step) {
    update_.factor = factor;
  } else {
    scale_gradients(factor);
  }
}

int Stage::write_next(std::span<const GroupOptions> groups) {
  step_place_.step(update_.from, update_.to, groups, update_.factor);
  return update_.to;
}

StageBytes Stage::bytes() const {
  StageBytes bytes;
  const std::int64_t num_versions = slots_.num_versions();
  const std::int64_t num_gradients = has_two_gradients_ ? 2 : 1;
  for (std::size_t buffer = 0; buffer < layout_.buffers().size(); ++buffer) {
    const std::int64_t numel = layout_.packing(buffer).parameter_numel();
    const auto add = [&](std::int64_t& to, std::int64_t count, std::int64_t used,
                         const at::Tensor& flat) {
      const auto size = static_cast<std::int64_t>(flat.element_size());
      to += count * used * size;
      bytes.padding += count * (flat.numel() - used) * size;
    };
    add(bytes.weights, num_versions, numel, slots_.flat(0)[buffer]);
    add(bytes.gradients, num_gradients, numel, gradients_.of_dtype(buffer).flat(0));
    bytes.kept_gradients += gradients_.of_dtype(buffer).most_kept_bytes();
    if (const at::Tensor& master = masters_.flats()[buffer]; master.defined()) {
      std::int64_t mine = 0;
      for (std::size_t i = 0; i < layout_.num_parameters(); ++i) {
        mine += layout_.place(i).buffer == buffer ? masters_.elements(i).numel : 0;
      }
      add(bytes.masters, 1, mine, master);
    }
  }
  const PaddedBytes state = step_place_.state_bytes();
  bytes.optimizer_state = state.used;
  bytes.padding += state.padding;
  bytes.replica_sums = gradients_.replicas() ? gradients_.replicas()->bytes() : 0;
  if (const HostMirror* host = gradients_.host()) {
    const PaddedBytes copies = host->bytes();
    bytes.host_copies = copies.used;
    bytes.padding += copies.padding;
    bytes.on_host = copies.used + copies.padding + state.used + state.padding;
    for (const at::Tensor& master : masters_.flats()) {
      bytes.on_host += master.defined() ? static_cast<std::int64_t>(master.nbytes()) : 0;
    }
  }
  return bytes;
}

}  // namespace pd2
