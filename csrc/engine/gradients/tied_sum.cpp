#include "engine/gradients/tied_sum.h"

#include "core/check.h"
#include "engine/channels/wait_for_work.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

namespace pd2 {
namespace {

// Where a row has each gradient's bytes, at multiples of any dtype's size, as are rows' sizes. At
// the row's end is room for a byte for each: whether it exists.
struct RowLayout {
  explicit RowLayout(std::span<const TiedGradient> gradients) {
    const auto aligned = [](std::size_t offset) {
      return static_cast<std::int64_t>((offset + 15) / 16 * 16);
    };
    std::int64_t end = 0;
    for (const TiedGradient& each : gradients) {
      starts.push_back(end);
      end = aligned(end + each.gradient.nbytes());
    }
    size = aligned(end + gradients.size());
  }

  // The i-th gradient's place in a row.
  at::Tensor place(const at::Tensor& bytes, std::size_t i, const at::Tensor& gradient) const {
    return bytes.narrow(0, starts[i], static_cast<std::int64_t>(gradient.nbytes()))
        .view(gradient.scalar_type())
        .as_strided(gradient.sizes(), gradient.strides());
  }

  std::vector<std::int64_t> starts;
  std::int64_t size = 0;
};

std::uint8_t* flags_of(const at::Tensor& bytes, std::size_t num_flags) {
  return bytes.mutable_data_ptr<std::uint8_t>() + bytes.numel() - num_flags;
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
  const std::vector<Row> rows = exchange(batch, copy, pack(gradients), is_stopped);
  for (const Row& row : rows) {  // which may be another device's
    const MaybeStream here = stream_here(row.bytes.device());
    row.ready.hold_back(here);
    use_on(row.bytes, here);
  }
  const RowLayout layout(gradients);
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    auto& [sum, exists] = gradients[i];
    exists = false;
    for (std::size_t other = 0; other < rows.size(); ++other) {
      if (rows[other].flags[i] == 0) {
        continue;
      }
      const bool is_first = !std::exchange(exists, true);
      if (is_first && other == copy) {
        continue;  // the copy's own, which is there
      }
      const at::Tensor part = layout.place(rows[other].bytes, i, sum);
      if (is_first) {
        sum.copy_(part, /*non_blocking=*/true);
      } else {
        sum.add_(part.to(sum.options(), /*non_blocking=*/true));
      }
    }
  }
}

TiedSum::Row TiedSum::pack(std::span<const TiedGradient> gradients) const {
  const RowLayout layout(gradients);
  const c10::Device device = gradients.front().gradient.device();
  const at::TensorOptions bytes(at::kByte);
  // A transfer between devices would keep them busy until all stages have come to their updates.
  Row row{at::empty({layout.size},
                    group_ ? bytes.pinned_memory(has_streams(device)) : bytes.device(device)),
          {},
          {}};
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    const at::Tensor& gradient = gradients[i].gradient;
    layout.place(row.bytes, i, gradient).copy_(gradient, /*non_blocking=*/true);
    row.flags.push_back(gradients[i].exists);
  }
  row.ready = Fence::here(device);
  if (group_) {
    std::exchange(row.ready, Fence()).wait();
    std::ranges::copy(row.flags, flags_of(row.bytes, row.flags.size()));
  }
  return row;
}

std::vector<TiedSum::Row> TiedSum::exchange(std::int64_t batch, std::size_t copy, Row row,
                                            const std::function<bool()>& is_stopped) {
  std::unique_lock lock(mutex_);
  Batch& mine = batches_[batch];  // stays where it is
  mine.rows.resize(processes_.size());
  PD2_ASSERT(!mine.rows.at(copy).bytes.defined(), "copy ", copy, " came twice to batch ", batch);
  mine.rows[copy] = std::move(row);
  if (++mine.copies_given == num_here_) {  // the others only look whether it is complete
    lock.unlock();
    gather(mine.rows, is_stopped);
    lock.lock();
    mine.complete = true;
    changed_.notify_all();
  }
  wait_until(changed_, lock, is_stopped, [&] { return mine.complete; });
  std::vector<Row> all = mine.rows;
  if (++mine.times_read == num_here_) {
    batches_.erase(batch);
  }
  return all;
}

void TiedSum::gather(std::vector<Row>& rows, const std::function<bool()>& is_stopped) const {
  if (!group_) {
    return;
  }
  // As many rows of each process: what is missing is padding.
  std::vector<at::Tensor> here;
  std::size_t num_flags = 0;
  for (std::size_t copy = 0; copy < rows.size(); ++copy) {
    if (processes_[copy] == rank()) {
      here.push_back(rows[copy].bytes);
      num_flags = rows[copy].flags.size();
    }
  }
  here.resize(most_per_process_, here.front());
  std::vector<at::Tensor> given{here.size() == 1 ? here.front() : at::cat(here)};
  // From where devices read, later than the host is here.
  const at::TensorOptions options = at::TensorOptions(at::kByte).pinned_memory(here[0].is_pinned());
  std::vector<std::vector<at::Tensor>> gathered(1);
  for (int process = 0; process < group_->getSize(); ++process) {
    gathered.front().push_back(at::empty(given.front().sizes(), options));
  }
  const auto work = group_->allgather(gathered, given);
  wait_for_work(*work, timeout_of(group_.get()), /*on_host=*/true, is_stopped);
  const std::int64_t size = here.front().numel();
  for (std::size_t copy = 0; copy < rows.size(); ++copy) {
    if (processes_[copy] != rank()) {
      const at::Tensor bytes = gathered.front()[processes_[copy]];
      rows[copy].bytes = bytes.narrow(0, places_[copy] * size, size);
      const std::uint8_t* first = flags_of(rows[copy].bytes, num_flags);
      rows[copy].flags.assign(first, first + num_flags);
    }
  }
}

}  // namespace pd2
