// How a batch's loss gets from the last stage to whoever asks for it.
#pragma once

#include "engine/fault.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace pd2 {

// One batch's loss: there once the last stage has forwarded the batch's last microbatch.
struct LossSlot {
  std::optional<double> value;
  at::Tensor tensor;  // in the process of the last stage, read (and waited for, on CUDA) on demand
};

// Losses travel apart from the data, by one message per batch and rank over a control group:
// waiting for a loss together with the gradients would deadlock, since the last gradients of batch
// t move only once batch t + 1 is forwarded. In a process group a thread of the board's own does
// the waiting, so that a reader can give up (Ctrl-C) and the executor never waits for a reader.
//
// expect() is called once per batch in batch order; publish() in the last stage's process only.
class LossBoard {
 public:
  // Without a group everything happens in one process. `ranks`: of each stage of the replica,
  // within `group`.
  LossBoard(std::shared_ptr<Fault> fault, c10::intrusive_ptr<c10d::ProcessGroup> group,
            std::vector<int> ranks, int replica, int num_replicas);
  ~LossBoard();
  LossBoard(const LossBoard&) = delete;
  LossBoard& operator=(const LossBoard&) = delete;

  std::shared_ptr<LossSlot> expect(std::int64_t batch);
  void publish(std::int64_t batch, at::Tensor loss);

  bool done(const LossSlot& slot) const;
  // True when the loss is there within `timeout`; throws PipelineError if the pipeline has failed
  // before it arrived.
  bool wait_for(const LossSlot& slot, std::chrono::milliseconds timeout) const;

  // True when every expected loss has arrived here and, at the last stage, everywhere else.
  bool finish_for(std::chrono::milliseconds timeout);

  // Ends the thread; losses that have not arrived never will.
  void close();

 private:
  using Work = c10::intrusive_ptr<c10d::Work>;
  void send_losses();
  void receive_losses();
  // Posts transfers and waits for them; close() can end the wait.
  template <typename Post>
  void transfer(Post post);
  void fail(std::int64_t batch, const std::string& what);

  const std::shared_ptr<Fault> fault_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const std::vector<int> ranks_;
  const int last_stage_rank_;
  const std::string last_stage_;

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::deque<std::pair<std::int64_t, std::shared_ptr<LossSlot>>> expected_;
  std::deque<std::pair<std::int64_t, at::Tensor>> to_send_;
  std::vector<Work> under_way_;  // what the thread waits for
  bool closed_ = false;
  std::thread thread_;
};

}  // namespace pd2
