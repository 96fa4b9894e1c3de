// The sum of the gradients of parameters that several stages hold (tied weights).
#pragma once

#include "engine/process_group.h"
#include "engine/streams.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <span>
#include <vector>

namespace pd2 {

// A parameter's gradient on one stage; without one the memory's content means nothing.
struct TiedGradient {
  at::Tensor gradient;
  bool exists = false;
};

// Shared by the stages of this process that hold one set of parameters. In every batch each of
// them hands over its gradients and waits for all the others'. Then all add them up in the order
// of the stages, so that every copy gets the same bits, in threads and in processes alike.
//
// Gradients travel packed: one row of bytes per stage, whatever the dtypes, between processes in
// the hosts' memory. Gradients must be dense.
class TiedSum {
 public:
  // `processes`: by copy, in the order of the stages, the rank in the group of the process that
  // holds it. The group joins hosts; without one all copies are in this process.
  TiedSum(std::vector<int> processes, c10::intrusive_ptr<c10d::ProcessGroup> group);

  // Called by the updates' threads, each for its copy; every copy has the same parameters, of the
  // same shapes and strides, in the same order. `gradients` become the sums; a copy without a
  // gradient adds nothing. Throws ChannelAborted when `is_stopped`.
  void add(std::int64_t batch, std::size_t copy, std::span<TiedGradient> gradients,
           const std::function<bool()>& is_stopped);

  // Releases the connections to the other processes.
  void drop_connections() { release_group(group_); }

 private:
  struct Row {
    at::Tensor bytes;
    std::vector<std::uint8_t> flags;  // by gradient: whether it exists
    Fence ready;
  };
  struct Batch {
    std::vector<Row> rows;  // by copy
    int copies_given = 0;
    bool complete = false;
    int times_read = 0;
  };
  // A copy's row: with a group on the host, and there when this returns.
  Row pack(std::span<const TiedGradient> gradients) const;
  // The rows of all copies, once all have come.
  std::vector<Row> exchange(std::int64_t batch, std::size_t copy, Row row,
                            const std::function<bool()>& is_stopped);
  // Fills in the rows of the other processes.
  void gather(std::vector<Row>& rows, const std::function<bool()>& is_stopped) const;
  int rank() const { return group_ ? group_->getRank() : 0; }

  const std::vector<int> processes_;
  std::vector<int> places_;  // by copy: its number among its process's
  int most_per_process_ = 0;
  int num_here_ = 0;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::int64_t, Batch> batches_;  // that have not been read by all
};

}  // namespace pd2
