#include "engine/gradients/tied_sum.h"

#include "core/check.h"
#include "engine/channels/channel.h"
#include "engine/channels/wait_for_work.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <utility>

namespace pd2 {
namespace {

// The bytes of every parameter's gradient; behind them a byte for each: whether it exists.
at::Tensor pack(std::span<const TiedGradient> gradients) {
  std::vector<at::Tensor> parts;
  std::vector<std::uint8_t> flags;
  for (const TiedGradient& each : gradients) {
    parts.push_back(storage_order(each.gradient).view(at::kByte));
    flags.push_back(each.exists);
  }
  parts.push_back(at::tensor(flags, at::kByte).to(parts.front().device()));
  return at::cat(parts);
}

}  // namespace

TiedSum::TiedSum(std::vector<int> processes, c10::intrusive_ptr<c10d::ProcessGroup> group)
    : processes_(std::move(processes)), group_(std::move(group)) {
  std::map<int, int> counts;
  for (const int process : processes_) {
    PD2_ASSERT(process >= 0 && process < (group_ ? group_->getSize() : 1), "rank ", process);
    places_.push_back(counts[process]++);
    most_per_process_ = std::max(most_per_process_, counts[process]);
  }
  num_here_ = counts[rank()];
}

void TiedSum::add(std::int64_t batch, std::size_t copy, std::span<TiedGradient> gradients,
                  const std::function<bool()>& is_stopped) {
  PD2_ASSERT(!gradients.empty(), "no gradients");
  const Batch all = exchange(batch, copy, pack(gradients), is_stopped);
  const std::vector<at::Tensor>& rows = all.rows;
  for (const at::Tensor& row : rows) {  // which may be another device's
    const MaybeStream here = stream_here(row.device());
    for (const Fence& ready : all.ready) {
      ready.hold_back(here);
    }
    use_on(row, here);
  }
  const auto num_flags = static_cast<std::int64_t>(gradients.size());
  std::vector<at::Tensor> flags;
  for (const at::Tensor& row : rows) {
    flags.push_back(row.narrow(0, row.numel() - num_flags, num_flags).to(at::kCPU));
  }
  std::int64_t offset = 0;
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    auto& [sum, exists] = gradients[i];
    const auto nbytes = static_cast<std::int64_t>(sum.nbytes());
    exists = false;
    for (std::size_t other = 0; other < rows.size(); ++other) {
      if (flags[other].const_data_ptr<std::uint8_t>()[i] == 0) {
        continue;
      }
      const bool is_first = !std::exchange(exists, true);
      if (is_first && other == copy) {
        continue;  // the copy's own, which is there
      }
      at::Tensor bytes = rows[other].narrow(0, offset, nbytes);
      if (bytes.storage_offset() % sum.element_size() != 0) {  // after another dtype's gradients
        bytes = bytes.clone();
      }
      const at::Tensor part = bytes.view(sum.scalar_type()).as_strided(sum.sizes(), sum.strides());
      if (is_first) {
        sum.copy_(part);
      } else {
        sum.add_(part.to(sum.device()));
      }
    }
    offset += nbytes;
  }
}

TiedSum::Batch TiedSum::exchange(std::int64_t batch, std::size_t copy, at::Tensor row,
                                 const std::function<bool()>& is_stopped) {
  const c10::Device device = row.device();
  std::unique_lock lock(mutex_);
  Batch& mine = batches_[batch];  // stays where it is
  mine.rows.resize(processes_.size());
  mine.ready.resize(processes_.size() + 1);
  PD2_ASSERT(!mine.rows.at(copy).defined(), "copy ", copy, " came twice to batch ", batch);
  mine.rows[copy] = std::move(row);
  mine.ready[copy] = Fence::here(device);
  if (++mine.copies_given == num_here_) {  // the others only look whether it is complete
    lock.unlock();
    gather(mine, is_stopped);
    mine.ready.back() = Fence::here(device);
    lock.lock();
    mine.complete = true;
    changed_.notify_all();
  }
  while (!changed_.wait_for(lock, std::chrono::milliseconds(100), [&] { return mine.complete; })) {
    lock.unlock();
    if (is_stopped()) {
      throw ChannelAborted();
    }
    lock.lock();
  }
  Batch all = mine;
  if (++mine.times_read == num_here_) {
    batches_.erase(batch);
  }
  return all;
}

void TiedSum::gather(Batch& batch, const std::function<bool()>& is_stopped) const {
  if (!group_) {
    return;
  }
  std::vector<at::Tensor>& rows = batch.rows;
  for (std::size_t copy = 0; copy < rows.size(); ++copy) {
    if (rows[copy].defined()) {
      batch.ready[copy].hold_back(stream_here(rows[copy].device()));
    }
  }
  // As many rows of each process: what is missing is padding.
  std::vector<at::Tensor> here;
  for (std::size_t copy = 0; copy < rows.size(); ++copy) {
    if (processes_[copy] == rank()) {
      here.push_back(rows[copy]);
    }
  }
  here.resize(most_per_process_, here.front());
  std::vector<at::Tensor> given{here.size() == 1 ? here.front() : at::cat(here)};
  std::vector<std::vector<at::Tensor>> gathered(1);
  for (int process = 0; process < group_->getSize(); ++process) {
    gathered.front().push_back(at::empty_like(given.front()));
  }
  const auto work = group_->allgather(gathered, given);
  wait_for_work(*work, timeout_of(group_.get()), !has_streams(given.front().device()), is_stopped);
  const std::int64_t size = here.front().numel();
  for (std::size_t copy = 0; copy < rows.size(); ++copy) {
    if (processes_[copy] != rank()) {
      rows[copy] = gathered.front()[processes_[copy]].narrow(0, places_[copy] * size, size);
    }
  }
}

}  // namespace pd2
