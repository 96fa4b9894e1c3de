#include "engine/update/gradient_norm.h"

#include "core/check.h"
#include "engine/channels/channel.h"
#include "engine/channels/wait_for_work.h"

#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <span>
#include <utility>

namespace pd2 {

GradientNorm::GradientNorm(std::shared_ptr<Fault> fault, std::int64_t num_parameters,
                           int num_stages, int num_readers, double norm_type, at::ScalarType dtype,
                           c10::intrusive_ptr<c10d::ProcessGroup> group,
                           std::shared_ptr<SharedBoard> shared,
                           std::shared_ptr<LossScale> loss_scale)
    : fault_(std::move(fault)),
      num_parameters_(num_parameters),
      num_stages_(num_stages),
      num_readers_(num_readers),
      norm_type_(norm_type),
      dtype_(dtype),
      group_(std::move(group)),
      shared_(std::move(shared)),
      loss_scale_(std::move(loss_scale)) {
  PD2_ASSERT(num_stages >= 1 && num_readers >= num_stages, num_stages, " of ", num_readers);
}

GradientNorm::Batch& GradientNorm::batch(std::int64_t number) {
  Batch& batch = batches_[number];
  if (!batch.norms.defined()) {
    batch.norms = at::zeros({2, num_parameters_}, at::kDouble);
  }
  return batch;
}

std::shared_ptr<NormSlot> GradientNorm::expect(std::int64_t batch) {
  const std::lock_guard lock(mutex_);
  return this->batch(batch).slot = std::make_shared<NormSlot>();
}

bool GradientNorm::done(const NormSlot& slot) const {
  const std::lock_guard lock(mutex_);
  return slot.value.has_value();
}

bool GradientNorm::wait_for(const NormSlot& slot, std::chrono::milliseconds timeout) const {
  std::unique_lock lock(mutex_);
  const bool there = changed_.wait_for(lock, timeout, [&] { return slot.value.has_value(); });
  if (!there) {
    fault_->rethrow_if_raised();
  }
  return there;
}

void GradientNorm::give(std::int64_t batch, const ParameterNorms& norms,
                        const std::function<bool()>& is_stopped) {
  at::Tensor all;
  {
    const std::lock_guard lock(mutex_);
    Batch& mine = this->batch(batch);
    auto values = mine.norms.accessor<double, 2>();
    const double* given = norms.norms.const_data_ptr<double>();
    for (std::size_t i = 0; i < norms.parameters.size(); ++i) {
      values[0][norms.parameters[i]] = given[i];
      values[1][norms.parameters[i]] = 1;
    }
    if (++mine.stages_given < num_stages_) {
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
    Batch& mine = this->batch(batch);
    mine.total = total;
    if (mine.slot) {
      mine.slot->value = total.item<double>();
    }
  }
  changed_.notify_all();
}

// Every parameter is one process's: the others add zeros, which changes no bit.
void GradientNorm::exchange(at::Tensor& norms, const std::function<bool()>& is_stopped) {
  if (!shared_) {
    if (group_) {
      std::vector<at::Tensor> tensors{norms};
      wait_for_work(*group_->allreduce(tensors), is_stopped);
    }
    return;
  }
  const std::span<double> mine(norms.mutable_data_ptr<double>(), norms.numel());
  std::vector<std::int64_t> row(mine.size());
  std::ranges::transform(mine, row.begin(), std::bit_cast<std::int64_t, double>);
  shared_->begin_exchange(row);
  std::optional<std::vector<std::int64_t>> rows;
  while (!(rows = shared_->finish_exchange(std::chrono::milliseconds(100)))) {
    if (is_stopped()) {
      throw ChannelAborted();
    }
  }
  std::ranges::fill(mine, 0.0);
  for (std::size_t i = 0; i < rows->size(); ++i) {
    mine[i % mine.size()] += std::bit_cast<double>((*rows)[i]);
  }
}

void GradientNorm::drop_connections() {
  group_.reset();
  if (shared_) {
    shared_->leave();
  }
}

at::Tensor GradientNorm::wait(std::int64_t batch, const std::function<bool()>& is_stopped) {
  std::unique_lock lock(mutex_);
  Batch& mine = this->batch(batch);  // stays where it is
  while (!changed_.wait_for(lock, std::chrono::milliseconds(100),
                            [&] { return mine.total.defined(); })) {
    lock.unlock();
    if (is_stopped()) {
      throw ChannelAborted();
    }
    lock.lock();
  }
  at::Tensor total = mine.total;
  if (++mine.times_read == num_readers_) {
    batches_.erase(batch);
  }
  return total;
}

at::Tensor GradientNorm::total_of(const at::Tensor& norms) const {
  const auto values = norms.accessor<double, 2>();
  std::vector<double> present;
  for (std::int64_t i = 0; i < num_parameters_; ++i) {
    if (values[1][i] != 0) {
      present.push_back(values[0][i]);
    }
  }
  return at::linalg_vector_norm(at::tensor(present, at::kDouble).to(dtype_), norm_type_);
}

}  // namespace pd2
