// How a batch's loss gets from the last stage to whoever asks for it.
#pragma once

#include "engine/fault.h"
#include "engine/loss/batch_loss.h"
#include "transport/shared_board.h"

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

// One batch's loss and, after it, its metrics: there soon after the last stage has forwarded the
// batch's last microbatch.
struct LossSlot {
  std::vector<double> numbers;  // empty until then
  bool there() const { return !numbers.empty(); }
};

// Losses travel apart from the data, through memory that all ranks share or, where they cannot, by
// one message per batch and rank over a control group:
// waiting for a loss together with the gradients would deadlock, since the last gradients of batch
// t move only once batch t + 1 is forwarded. A thread of the board's own adds, sends and waits, so
// that a reader can give up (Ctrl-C), the executor never waits for a reader, and the last stage's
// executor, for which all others wait in the end, does none of it.
//
// With two pipelines each one's last stage publishes its part of the batch's loss. Pipeline 0's
// goes to pipeline 1's last stage, which adds its own (losses add up in microbatch order) and sends
// the loss to all: a chain of two.
//
// expect() is called once per batch in batch order; publish() in the last stages' processes only,
// for each pipeline in batch order.
class LossBoard {
 public:
  // Without a group everything happens in one process. `ranks`: of each stage of the replica, in
  // the order of the pipelines, within `group`. `shared`: of the group's ranks, null if they have
  // no such memory; close() leaves it. `num_numbers`: a loss and its metrics.
  LossBoard(std::shared_ptr<Fault> fault, c10::intrusive_ptr<c10d::ProcessGroup> group,
            std::shared_ptr<SharedBoard> shared, const std::vector<int>& ranks, int replica,
            int num_replicas, int num_pipelines = 1, int num_numbers = 1);
  ~LossBoard();
  LossBoard(const LossBoard&) = delete;
  LossBoard& operator=(const LossBoard&) = delete;

  std::shared_ptr<LossSlot> expect(std::int64_t batch);
  void publish(std::int64_t batch, BatchLoss loss, int pipeline = 0);

  bool done(const LossSlot& slot) const;
  // True when the loss is there within `timeout`; throws PipelineError if the pipeline has failed
  // before it arrived.
  bool wait_for(const LossSlot& slot, std::chrono::milliseconds timeout) const;

  // True when every expected loss has arrived here and, where it is sent from, everywhere else.
  bool finish_for(std::chrono::milliseconds timeout);

  // Ends the thread; losses that have not been published or have not arrived never will.
  void close();

 private:
  using Work = c10::intrusive_ptr<c10d::Work>;
  struct Part {
    std::int64_t batch;
    BatchLoss loss;
  };
  bool is_here(int pipeline) const {
    return !group_ || group_->getRank() == last_stages_[pipeline];
  }
  // Of the next batch, when the parts that are published here are there; none if closed before.
  struct Next {
    std::int64_t batch;
    std::vector<std::optional<BatchLoss>> parts;  // by pipeline
  };
  std::optional<Next> wait_for_next();
  // Under the lock: to whoever expects the next loss.
  void deliver(const at::Tensor& numbers);

  void send_losses();
  void receive_losses();
  void send(const at::Tensor& numbers, const std::vector<int>& ranks);
  // False if the board was closed meanwhile.
  bool receive(const at::Tensor& numbers, int rank);
  // Posts transfers over the group and waits for them; close() can end the wait.
  template <typename Post>
  void transfer(Post post);
  void fail(std::int64_t batch, const std::string& what);

  const std::shared_ptr<Fault> fault_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const std::shared_ptr<SharedBoard> shared_;
  std::vector<int> last_stages_;  // ranks, by pipeline; the last one sends the losses
  std::string last_stage_;
  const int num_numbers_;
  std::vector<int> readers_;  // the replica's other ranks

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  // Not yet here, and not yet everywhere if they are sent from here.
  std::deque<std::pair<std::int64_t, std::shared_ptr<LossSlot>>> expected_;
  std::vector<std::deque<Part>> published_;  // by pipeline: not yet added
  std::vector<Work> under_way_;              // what the thread waits for, over the group
  bool closed_ = false;
  std::thread thread_;
};

}  // namespace pd2
