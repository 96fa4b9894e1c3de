// Whether a batch may be used for an update: only if no stage of any process failed in it.
#pragma once

#include "engine/discards.h"
#include "transport/shared_board.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

namespace pd2 {

// Shared by the updates of a process's stages. Every stage gives its word when it has done its last
// backward of a batch. The last of the process to do so exchanges with the other processes what is
// known of discarded batches. Nobody's update begins to change anything before that is known of
// all, and so nothing is ever undone.
//
// A batch is named by its last run. All stages come to the batches in one order.
class BatchVerdicts {
 public:
  // Of `num_stages` in this process. Without a `group` all stages are in this process. `shared`: of
  // the group's ranks, rows of 1, for this object alone; null if they share no memory.
  BatchVerdicts(int num_stages, std::shared_ptr<Discards> discards,
                c10::intrusive_ptr<c10d::ProcessGroup> group, std::shared_ptr<SharedBoard> shared);

  // Called by the executors' threads. Throws ChannelAborted when `is_stopped`, as wait() does.
  void give(std::int64_t run, const std::function<bool()>& is_stopped);
  // Waits until all stages have given their word. Then discards() knows of every failure in it.
  void wait(std::int64_t run, const std::function<bool()>& is_stopped);

  // Begins anew, after batches were taken back. All stages are idle.
  void forget();
  // Releases the connections to the other processes.
  void drop_connections();

 private:
  // Waits until `is_over`, and for the exchange that has begun if no other thread does.
  void finish_until(std::unique_lock<std::mutex>& lock, const std::function<bool()>& is_stopped,
                    const std::function<bool()>& is_over);
  void begin_exchange();
  // What all processes know, once all have begun; none if they have not within a slice of time.
  std::int64_t finish_exchange(const std::function<bool()>& is_stopped);

  const int num_stages_;
  const std::shared_ptr<Discards> discards_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::shared_ptr<SharedBoard> shared_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::int64_t, int> given_;  // by run: stages
  std::int64_t newest_known_ = -1;     // run
  std::optional<std::int64_t> under_way_;
  bool is_finishing_ = false;  // some thread waits for the exchange
  at::Tensor value_;           // over the group
  c10::intrusive_ptr<c10d::Work> work_;
};

}  // namespace pd2
