// Brings a run's loss from the last stage to those who ask for it.
#pragma once

#include "engine/awaited_numbers.h"
#include "engine/fault.h"
#include "engine/loss/run_loss.h"
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

struct LossBoardOptions {
  // By stage, in the order of the loss's parts: its rank within the board's group.
  std::vector<int> ranks;
  int replica = 0;
  int num_replicas = 1;
  int num_parts = 1;    // of a loss: pipelines, of the replica or of all
  int first_part = 0;   // that the replica's pipeline 0 publishes
  int num_numbers = 1;  // a loss and its metrics
  int runs_behind = 0;  // how many runs later the last stage forwards, unless it drains
};

// Losses travel apart from the data, through memory that all ranks share or, where they share none,
// by one message per run and rank over a control group: waiting for a loss together with the
// gradients would deadlock, since the last gradients of run t move only once run t + 1 is
// forwarded. The board's own thread adds, sends and waits, so that a reader can give up (Ctrl-C),
// the executor never waits for a reader, and the last stage's executor, for which all others wait
// in the end, does none of it.
//
// With two pipelines the last stage of each publishes its part of the run's loss, and so does that
// of each replica where all train on parts of one batch. The sum of the parts before goes to the
// next part's last stage, which adds its own (losses add up in microbatch order), and the last one
// of this chain sends the loss to all.
//
// expect() is called once per run in order; publish() in the last stages' processes only, for each
// of the replica's pipelines in the order of the runs.
class LossBoard {
 public:
  // Without a `group` everything happens in one process. `shared`: of the group's ranks, null if
  // they share no memory; close() leaves it.
  LossBoard(const LossBoardOptions& options, std::shared_ptr<Fault> fault,
            c10::intrusive_ptr<c10d::ProcessGroup> group, std::shared_ptr<SharedBoard> shared);
  ~LossBoard();
  LossBoard(const LossBoard&) = delete;
  LossBoard& operator=(const LossBoard&) = delete;

  // The run's loss and, after it, its metrics: given soon after the last stage has forwarded the
  // run's last microbatch. No numbers if the run was discarded before.
  std::shared_ptr<AwaitedNumbers> expect(std::int64_t run);
  void publish(std::int64_t run, RunLoss loss, int pipeline = 0);

  // The stages drain: all expected losses come, without a further run.
  void drain();

  // True if every loss that needs no further run has arrived here and, if this process sends it,
  // everywhere else.
  bool finish_for(std::chrono::milliseconds timeout);

  // Ends the thread; losses that have not been published or have not arrived never will.
  void close();

 private:
  using Work = c10::intrusive_ptr<c10d::Work>;
  bool is_here(std::size_t part) const {
    return !group_ || group_->getRank() == last_stages_[part];
  }
  // The parts of the next run's loss that are published here; none if closed before.
  struct Next {
    std::int64_t run;
    std::vector<std::optional<RunLoss>> parts;
  };
  std::optional<Next> wait_for_next();
  // Whether the next expected loss needs no further run. Called under the lock.
  bool is_due() const { return num_due_ > 0; }

  void bring_losses();
  // Adds the next loss's parts that are published here, and sends the sum on along the chain.
  // Nothing if this process does not end the chain, or if the board was closed meanwhile.
  std::optional<at::Tensor> add_up(Next& next);
  void send(const at::Tensor& numbers, const std::vector<int>& ranks);
  // None if the board was closed meanwhile.
  std::optional<at::Tensor> receive(int rank);
  // Posts a transfer over the group with each of the ranks and waits for them; close() can end the
  // wait.
  template <typename Post>
  void transfer(const std::vector<int>& ranks, Post post);
  // With the exception that is being handled; `what` failed.
  void fail(std::int64_t run, const std::string& what);

  const std::shared_ptr<Fault> fault_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const std::shared_ptr<SharedBoard> shared_;
  std::vector<int> last_stages_;  // ranks, by part; the last one sends the losses
  const int last_stage_;          // of the model
  const LossBoardOptions options_;
  std::vector<int> readers_;  // all other ranks

  std::mutex mutex_;
  std::condition_variable changed_;
  // By run: losses that are not yet here, or not yet everywhere if they are sent from here.
  std::deque<std::pair<std::int64_t, std::shared_ptr<AwaitedNumbers>>> expected_;
  // How many of these, from the first on, need no further run. Not a run's number: runs that were
  // discarded are repeated.
  std::size_t num_due_ = 0;
  std::vector<std::deque<std::pair<std::int64_t, RunLoss>>> published_;  // by part: not yet added
  std::vector<Work> under_way_;  // transfers over the group that the thread waits for
  bool closed_ = false;
  std::thread thread_;
};

}  // namespace pd2
