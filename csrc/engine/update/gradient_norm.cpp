#include "engine/update/gradient_norm.h"

#include "core/check.h"
#include "engine/channels/channel.h"
#include "engine/channels/wait_for_work.h"
#include "engine/release_group.h"

#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <span>
#include <string>
#include <utility>

namespace pd2 {

GradientNorm::GradientNorm(const GradientNormOptions& options, std::shared_ptr<Fault> fault,
                           c10::intrusive_ptr<c10d::ProcessGroup> group,
                           std::shared_ptr<SharedBoard> shared,
                           std::shared_ptr<LossScale> loss_scale)
    : options_(options),
      fault_(std::move(fault)),
      group_(std::move(group)),
      shared_(std::move(shared)),
      loss_scale_(std::move(loss_scale)) {
  PD2_ASSERT(options.num_stages >= 1 && options.num_readers >= options.num_stages,
             options.num_stages, " of ", options.num_readers);
}

GradientNorm::Batch& GradientNorm::batch(std::int64_t run) {
  Batch& batch = batches_[run];
  if (!batch.norms.defined()) {
    batch.norms = at::zeros({2, options_.num_parameters}, at::kDouble);
  }
  return batch;
}

std::shared_ptr<AwaitedNumbers> GradientNorm::expect(std::int64_t run) {
  const std::lock_guard lock(mutex_);
  return this->batch(run).expected = std::make_shared<AwaitedNumbers>(fault_);
}

void GradientNorm::give(std::int64_t run, const ParameterNorms& norms,
                        const std::function<bool()>& is_stopped) {
  at::Tensor all;
  {
    const std::lock_guard lock(mutex_);
    Batch& mine = this->batch(run);
    auto rows = mine.norms.accessor<double, 2>();
    for (const auto& [parameter, norm] : norms) {
      rows[0][parameter] = norm;
      rows[1][parameter] = 1;
    }
    if (++mine.stages_given < options_.num_stages) {
      return;
    }
    all = mine.norms;
  }
  exchange(all, is_stopped);
  const at::Tensor total = total_of(all);
  {
    const std::lock_guard lock(mutex_);
    if (loss_scale_) {  // before anybody learns the total
      loss_scale_->decide(!std::isfinite(total.item<double>()));
    }
    Batch& mine = this->batch(run);
    mine.total = total;
    if (mine.expected) {
      mine.expected->give({total.item<double>()});
    }
  }
  changed_.notify_all();
}

// Each parameter's norm comes from one process: the others add zeros, which changes no bit.
void GradientNorm::exchange(at::Tensor& norms, const std::function<bool()>& is_stopped) {
  if (!shared_) {
    if (group_) {
      std::vector<at::Tensor> tensors{norms};
      wait_for_work(*group_->allreduce(tensors), timeout_of(group_.get()), /*on_host=*/true,
                    is_stopped);
    }
    return;
  }
  const std::span<double> mine(norms.mutable_data_ptr<double>(), norms.numel());
  std::vector<std::int64_t> row(mine.size());
  std::ranges::transform(mine, row.begin(), std::bit_cast<std::int64_t, double>);
  shared_->begin_exchange(row);
  std::optional<std::vector<std::int64_t>> rows;
  const double start = now(), timeout = shared_->timeout().count();
  while (!(rows = shared_->finish_exchange(std::chrono::milliseconds(100)))) {
    if (is_stopped()) {
      throw ChannelAborted();
    }
    if (now() - start > timeout) {
      throw PeerTimeout("timeout: a rank gave no norms for " + std::to_string(timeout) +
                        " seconds");
    }
  }
  std::ranges::fill(mine, 0.0);
  for (std::size_t i = 0; i < rows->size(); ++i) {
    mine[i % mine.size()] += std::bit_cast<double>((*rows)[i]);
  }
}

void GradientNorm::drop_connections() {
  release_group(group_);
  if (shared_) {
    shared_->leave();
  }
}

void GradientNorm::drop(std::int64_t run) {
  const std::lock_guard lock(mutex_);
  const auto place = batches_.find(run);
  if (place != batches_.end()) {
    if (place->second.expected) {
      place->second.expected->give({});
    }
    batches_.erase(place);
  }
}

at::Tensor GradientNorm::wait(std::int64_t run, const std::function<bool()>& is_stopped) {
  std::unique_lock lock(mutex_);
  Batch& mine = this->batch(run);  // stays where it is
  while (!changed_.wait_for(lock, std::chrono::milliseconds(100),
                            [&] { return mine.total.defined(); })) {
    lock.unlock();
    if (is_stopped()) {
      throw ChannelAborted();
    }
    lock.lock();
  }
  at::Tensor total = mine.total;
  if (++mine.times_read == options_.num_readers) {
    batches_.erase(run);
  }
  return total;
}

at::Tensor GradientNorm::total_of(const at::Tensor& norms) const {
  const auto values = norms.accessor<double, 2>();
  std::vector<double> present;
  for (std::int64_t i = 0; i < options_.num_parameters; ++i) {
    if (values[1][i] != 0) {
      present.push_back(values[0][i]);
    }
  }
  return at::linalg_vector_norm(at::tensor(present, at::kDouble).to(options_.dtype),
                                options_.norm_type);
}

}  // namespace pd2
