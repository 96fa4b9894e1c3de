#include "engine/update/gradient_norm.h"

#include "core/check.h"
#include "engine/channels/wait_for_work.h"
#include "engine/process_group.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <span>

namespace pd2 {
namespace {

// A tensor of the stream `from`, for the stream `to`.
at::Tensor moved(const at::Tensor& tensor, const MaybeStream& from, const Fence& ready,
                 const MaybeStream& to) {
  if (from->device() == to->device()) {
    ready.hold_back(to);
    use_on(tensor, to);
    return tensor;
  }
  const OnStream source(from);
  const OnStream destination(to);
  return tensor.to(to->device(), /*non_blocking=*/true);
}

}  // namespace

GradientNorm::GradientNorm(GradientNormOptions options, std::shared_ptr<Fault> fault,
                           c10::intrusive_ptr<c10d::ProcessGroup> group,
                           std::shared_ptr<SharedBoard> shared)
    : options_(std::move(options)),
      fault_(std::move(fault)),
      group_(std::move(group)),
      shared_(std::move(shared)) {
  PD2_ASSERT(options_.num_stages >= 1 && options_.num_readers >= options_.num_stages,
             options_.num_stages, " of ", options_.num_readers);
}

std::shared_ptr<AwaitedNumbers> GradientNorm::expect(std::int64_t run) {
  const std::lock_guard lock(mutex_);
  return batches_[run].expected = std::make_shared<AwaitedNumbers>(fault_);
}

void GradientNorm::give(std::int64_t run, ParameterNorms norms,
                        const std::function<bool()>& is_stopped) {
  std::vector<ParameterNorms> all;
  {
    const std::lock_guard lock(mutex_);
    std::vector<ParameterNorms>& given = batches_[run].given;
    given.push_back(std::move(norms));
    if (static_cast<int>(given.size()) < options_.num_stages) {
      return;
    }
    all = std::move(given);
  }
  const std::vector<Total> totals = options_.stays_on_devices
                                        ? totals_on_devices(all)
                                        : std::vector{total_on_host(all, is_stopped)};
  {
    const std::lock_guard lock(mutex_);
    if (options_.loss_scale) {  // before anybody learns the total
      options_.loss_scale->decide(!std::isfinite(totals.front().number.item<double>()));
    }
    Batch& mine = batches_[run];
    mine.totals = totals;
    if (mine.expected) {
      mine.expected->give_later([total = totals.front()] {
        total.ready.wait();
        return std::vector{total.number.item<double>()};
      });
    }
  }
  changed_.notify_all();
}

GradientNorm::Total GradientNorm::total_on_host(const std::vector<ParameterNorms>& given,
                                                const std::function<bool()>& is_stopped) {
  at::Tensor all = at::zeros({2, options_.num_parameters}, at::kDouble);
  auto rows = all.accessor<double, 2>();
  for (const ParameterNorms& each : given) {
    const double* norm = each.norms.const_data_ptr<double>();
    for (const std::int64_t parameter : each.parameters) {
      rows[0][parameter] = *norm++;
      rows[1][parameter] = 1;
    }
  }
  exchange(all, is_stopped);
  std::vector<double> present;
  for (std::int64_t i = 0; i < options_.num_parameters; ++i) {
    if (rows[1][i] != 0) {
      present.push_back(rows[0][i]);
    }
  }
  return {total_of(at::tensor(present, at::kDouble)), {}};
}

// Called by the last stage that has come. It gives every device the total before any stage goes on:
// a copy that a stage asked for later would come after another stage's step.
std::vector<GradientNorm::Total> GradientNorm::totals_on_devices(
    const std::vector<ParameterNorms>& given) const {
  const MaybeStream here = given.back().stream;
  std::vector<at::Tensor> present(options_.num_parameters);
  for (const auto& [parameters, norms, stream, ready] : given) {
    const at::Tensor all = parameters.empty() ? norms : moved(norms, stream, ready, here);
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      present[parameters[i]] = all[static_cast<std::int64_t>(i)];
    }
  }
  std::erase_if(present, [](const at::Tensor& norm) { return !norm.defined(); });
  const at::TensorOptions options = at::device(here->device()).dtype(at::kDouble);
  const at::Tensor total = total_of(present.empty() ? at::empty({0}, options) : at::stack(present));
  std::vector<Total> totals{{total, Fence::of(here)}};
  for (const ParameterNorms& each : given) {
    const auto is_there = [&](const Total& known) {
      return known.number.device() == each.stream->device();
    };
    if (std::ranges::none_of(totals, is_there)) {
      const at::Tensor copy = moved(total, here, totals.front().ready, each.stream);
      totals.push_back({copy, Fence::of(each.stream)});
    }
  }
  return totals;
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
  const std::vector<std::int64_t> rows = finish_exchange(*shared_, "norms", is_stopped);
  std::ranges::fill(mine, 0.0);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    mine[i % mine.size()] += std::bit_cast<double>(rows[i]);
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

at::Tensor GradientNorm::wait(std::int64_t run, const MaybeStream& here,
                              const std::function<bool()>& is_stopped) {
  std::unique_lock lock(mutex_);
  Batch& mine = batches_[run];  // stays where it is
  wait_until(changed_, lock, is_stopped, [&] { return !mine.totals.empty(); });
  const auto found = std::ranges::find_if(mine.totals, [&](const Total& each) {
    return !options_.stays_on_devices || each.number.device() == here->device();
  });
  PD2_ASSERT(found != mine.totals.end(), "no stage on ", here->device(), " gives norms");
  const Total total = *found;
  if (++mine.times_read == options_.num_readers) {
    batches_.erase(run);
  }
  lock.unlock();
  total.ready.hold_back(here);
  use_on(total.number, here);
  return total.number;
}

at::Tensor GradientNorm::total_of(const at::Tensor& present) const {
  return at::linalg_vector_norm(present.to(options_.dtype), options_.norm_type);
}

}  // namespace pd2
