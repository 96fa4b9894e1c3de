// The loop of a rank: a thread that walks the schedule's lists.
#pragma once

#include "core/schedule/schedule.h"
#include "engine/fault.h"
#include "engine/run/stage_worker.h"

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace pd2 {

struct ExecutorOptions {
  int rank = 0;  // of the schedule's
  int replica = 0;
  int num_replicas = 1;
  int num_microbatches = 1;  // of each pipeline
  int num_pipelines = 1;
  int depth = 0;  // stages of each pipeline
  // The first batches, each of which begins with an empty pipeline and all updates made. As the
  // workers have it.
  std::int64_t warmup_batches = 0;
  RankActions actions;
  int num_threads = 0;  // intra-op threads of this executor's thread, 0: as they are
  // Runs the loop that it is given, in the executor's thread, with what the forwards need there.
  std::function<void(const std::function<void()>& loop)> run_thread;
  // The text of an exception that came out of a forward or a backward (it may be a Python one).
  std::function<std::string(std::exception_ptr)> describe;
};

// Owns a thread that executes what is submitted, in order: training runs (the schedule's prologue
// if the pipeline is empty, else its steady list), updates, drains (the epilogue), evaluations.
// Knows no schedule's name and no Python. submit_* and wait_for may be called from one other
// thread; a submission returns a ticket. The first failure ends the thread, drops what is in flight
// and raises the fault.
//
// A schedule's batch is a run here. The U of a run which does not end its batch is passed over.
// Another one's update is executed there if it has been submitted by then, else when it is: the
// user may drain between the backward and opt.step(). A batch's updates of several stages are
// submitted in the schedule's order: replicas, some of which may be late, then reduce in one order.
class Executor {
 public:
  // `workers`: of all stages in `actions`, each once.
  Executor(ExecutorOptions options, std::vector<std::unique_ptr<StageWorker>> workers,
           std::shared_ptr<Fault> fault);
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // Throws ValueError if the executor does not run the stage.
  StageWorker& worker(int stage) const;

  using Ticket = std::int64_t;
  Ticket submit_batch(Run run);
  // `apply` makes the stage's next version from the gradients of the batch whose last run it is.
  Ticket submit_update(int stage, std::int64_t run, std::function<void(Stage&)> apply);
  Ticket submit_drain();
  // Forward only, no gradients, on the newest version. The pipeline must be drained. Of two
  // pipelines the first one does it.
  Ticket submit_evaluation(Run run);

  // True when everything up to the ticket has been executed, within `timeout`. Throws PipelineError
  // once the pipeline has failed.
  bool wait_for(Ticket ticket, std::chrono::milliseconds timeout);

  // The ticket of the last submission, 0 before the first.
  Ticket last_ticket() const;

  // Ends the thread; what has not been executed is dropped.
  void close();
  // After close().
  void drop_connections();

  void record(bool on);
  std::vector<ExecutedAction> take_record();

 private:
  struct Doing {
    int stage = 0;
    ActionKind kind = ActionKind::kForward;
    std::int64_t run = 0;
    int microbatch = 0;
    bool evaluating = false;
  };

  Ticket submit(std::function<void()> command);
  void loop();
  // In how many runs before the one that is being run the action's microbatch is.
  int runs_before(const Action& action) const;
  void begin_run(const Run& run);
  void run_actions(const std::vector<Action>& actions, std::int64_t last);
  void drain();
  void finish_updates();
  void evaluate(const Run& run);
  // Without the stages of the other pipeline.
  std::vector<StageWorker*> evaluating() const;
  void log(const ExecutedAction& action);
  void abort_channels();
  bool is_empty() const;
  std::string where(const Doing& doing) const;
  // Takes in the exception that is being handled.
  void fail(const Doing& doing);
  void begin_thread() const;

  const ExecutorOptions options_;
  const std::vector<std::unique_ptr<StageWorker>> workers_;
  const std::shared_ptr<Fault> fault_;

  // Touched by the executor's thread alone.
  // Since the pipeline was empty, as far as `steady` and `epilogue` go back: what is not there is
  // done. If there is one, microbatches may be in flight, and the next run continues with `steady`.
  std::map<std::int64_t, Run> runs_;
  int most_runs_before_ = 0;
  Doing doing_;

  mutable std::mutex mutex_;
  std::condition_variable submitted_, executed_;
  std::deque<std::function<void()>> commands_;
  Ticket last_ticket_ = 0, last_executed_ = 0;
  bool looping_ = false;
  bool closed_ = false;
  std::atomic<bool> recording_ = false;
  std::vector<ExecutedAction> record_;
  std::thread thread_;
};

}  // namespace pd2
