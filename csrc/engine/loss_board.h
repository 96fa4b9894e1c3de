// How a batch's loss gets from the last stage to whoever asks for it.
#pragma once

#include "engine/batch_loss.h"
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
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace pd2 {

// One batch's loss: there soon after the last stage has forwarded the batch's last microbatch.
struct LossSlot {
  std::optional<double> value;
};

// Losses travel apart from the data, by one message per batch and rank over a control group:
// waiting for a loss together with the gradients would deadlock, since the last gradients of batch
// t move only once batch t + 1 is forwarded. A thread of the board's own adds, sends and waits, so
// that a reader can give up (Ctrl-C), the executor never waits for a reader, and the last stage's
// executor, for which all others wait in the end, does none of it.
//
// expect() is called once per batch in batch order; publish() in the last stage's process only.
class LossBoard {
 public:
  // Without a group everything happens in one process. `ranks`: of each stage of the replica,
  // within `group`.
  LossBoard(std::shared_ptr<Fault> fault, c10::intrusive_ptr<c10d::ProcessGroup> group,
            const std::vector<int>& ranks, int replica, int num_replicas);
  ~LossBoard();
  LossBoard(const LossBoard&) = delete;
  LossBoard& operator=(const LossBoard&) = delete;

  std::shared_ptr<LossSlot> expect(std::int64_t batch);
  void publish(std::int64_t batch, BatchLoss loss);

  bool done(const LossSlot& slot) const;
  // True when the loss is there within `timeout`; throws PipelineError if the pipeline has failed
  // before it arrived.
  bool wait_for(const LossSlot& slot, std::chrono::milliseconds timeout) const;

  // True when every expected loss has arrived here and, at the last stage, everywhere else.
  bool finish_for(std::chrono::milliseconds timeout);

  // Ends the thread; losses that have not been published or have not arrived never will.
  void close();

 private:
  using Work = c10::intrusive_ptr<c10d::Work>;
  struct Published {
    std::int64_t batch;
    std::shared_ptr<LossSlot> slot;
    BatchLoss loss;
  };
  void send_losses();
  void receive_losses();
  // Posts transfers and waits for them; close() can end the wait.
  template <typename Post>
  void transfer(Post post);
  void fail(std::int64_t batch, const std::string& what);

  const std::shared_ptr<Fault> fault_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const int last_stage_rank_;
  const std::string last_stage_;
  std::set<int> readers_;  // the replica's other ranks

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::deque<std::pair<std::int64_t, std::shared_ptr<LossSlot>>> expected_;
  std::deque<Published> published_;  // not yet everywhere
  std::vector<Work> under_way_;      // what the thread waits for
  bool closed_ = false;
  std::thread thread_;
};

}  // namespace pd2
