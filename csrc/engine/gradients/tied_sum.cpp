#include "engine/gradients/tied_sum.h"

#include "core/check.h"
#include "engine/channels/channel.h"
#include "engine/channels/wait_for_work.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <utility>

namespace pd2 {
namespace {

// Views of every parameter's gradient in a row; behind them a byte for each: whether it exists.
class RowPacking {
 public:
  explicit RowPacking(std::span<const TiedGradient> gradients) : gradients_(gradients) {
    for (const TiedGradient& each : gradients) {
      offsets_.push_back(size_);
      size_ += aligned(static_cast<std::int64_t>(each.gradient.nbytes()));
    }
    flags_ = size_;
    size_ += aligned(static_cast<std::int64_t>(gradients.size()));
  }

  std::int64_t size() const { return size_; }

  at::Tensor view(const at::Tensor& row, std::size_t parameter) const {
    const at::Tensor& like = gradients_[parameter].gradient;
    const auto nbytes = static_cast<std::int64_t>(like.nbytes());
    const at::Tensor flat = row.narrow(0, offsets_[parameter], nbytes).view(like.scalar_type());
    return flat.as_strided(like.sizes(), like.strides(), flat.storage_offset());
  }

  at::Tensor flags(const at::Tensor& row) const {
    return row.narrow(0, flags_, static_cast<std::int64_t>(gradients_.size()));
  }

 private:
  static std::int64_t aligned(std::int64_t nbytes) { return (nbytes + 63) / 64 * 64; }

  std::span<const TiedGradient> gradients_;
  std::vector<std::int64_t> offsets_;
  std::int64_t flags_ = 0;
  std::int64_t size_ = 0;
};

at::Tensor pack(const RowPacking& packing, std::span<const TiedGradient> gradients) {
  const at::Tensor row = at::empty(
      {packing.size()}, at::TensorOptions(at::kByte).device(gradients.front().gradient.device()));
  at::Tensor flags = at::empty({static_cast<std::int64_t>(gradients.size())}, at::kByte);
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    flags.mutable_data_ptr<std::uint8_t>()[i] = gradients[i].exists ? 1 : 0;
    if (gradients[i].exists) {
      packing.view(row, i).copy_(gradients[i].gradient);
    }
  }
  packing.flags(row).copy_(flags);
  return row;
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
  const RowPacking packing(gradients);
  const std::vector<at::Tensor> rows = exchange(batch, copy, pack(packing, gradients), is_stopped);
  std::vector<at::Tensor> flags;
  for (const at::Tensor& row : rows) {
    flags.push_back(packing.flags(row).to(at::kCPU));
  }
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    auto& [sum, exists] = gradients[i];
    exists = false;
    for (std::size_t other = 0; other < rows.size(); ++other) {
      if (flags[other].const_data_ptr<std::uint8_t>()[i] == 0) {
        continue;
      }
      const at::Tensor part = packing.view(rows[other], i);
      if (exists) {
        sum.add_(part.to(sum.device()));
      } else if (other != copy) {  // the copy's own is there
        sum.copy_(part);
      }
      exists = true;
    }
  }
}

std::vector<at::Tensor> TiedSum::exchange(std::int64_t batch, std::size_t copy, at::Tensor row,
                                          const std::function<bool()>& is_stopped) {
  std::unique_lock lock(mutex_);
  Batch& mine = batches_[batch];  // stays where it is
  mine.rows.resize(processes_.size());
  PD2_ASSERT(!mine.rows.at(copy).defined(), "copy ", copy, " came twice to batch ", batch);
  mine.rows[copy] = std::move(row);
  if (++mine.copies_given == num_here_) {  // the others only look whether it is complete
    lock.unlock();
    gather(mine.rows, is_stopped);
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
  std::vector<at::Tensor> rows = mine.rows;
  if (++mine.times_read == num_here_) {
    batches_.erase(batch);
  }
  return rows;
}

void TiedSum::gather(std::vector<at::Tensor>& rows, const std::function<bool()>& is_stopped) const {
  if (!group_) {
    return;
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
  wait_for_work(*work, timeout_of(group_.get()), !given.front().is_cuda(), is_stopped);
  const std::int64_t size = here.front().numel();
  for (std::size_t copy = 0; copy < rows.size(); ++copy) {
    if (processes_[copy] != rank()) {
      rows[copy] = gathered.front()[processes_[copy]].narrow(0, places_[copy] * size, size);
    }
  }
}

}  // namespace pd2
