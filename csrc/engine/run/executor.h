// The loop of a rank: a thread that walks the schedule's lists.
#pragma once

#include "core/schedule/schedule.h"
#include "engine/fault.h"
#include "engine/run/action_log.h"
#include "engine/run/planned_receives.h"
#include "engine/run/run.h"
#include "engine/run/stage_worker.h"
#include "engine/streams.h"

#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace pd2 {

// Owns a thread that executes what is submitted, in order: training runs (the schedule's prologue
// if the pipeline is empty, else its steady list), updates, drains (the epilogue), evaluations.
// Knows no schedule's name and no Python. submit_* and wait_for may be called from one other
// thread; a submission returns a ticket. The first failure ends the thread, drops what is in flight
// and raises the fault.
//
// What a forward or a backward raises is no failure in that sense where all stages can do without
// its batch: they then go on through the lists without computing for it, each with every message
// that the schedule has, until a drain; and take_back() makes as if the batch had never been.
//
// On a device an action has been executed when all its work has been given to the stages' streams.
// What is submitted is done there after what the submitting thread's streams had been given before.
//
// A batch of the schedule is a run here. The U of a run that does not end its batch is skipped. The
// U of a run that does executes the update if it has been submitted by then; otherwise the update
// is executed when it is submitted: the user may drain between the backward and opt.step(). A
// batch's updates of several stages are submitted in the schedule's order, so that all replicas
// reduce in one order.
class Executor {
 public:
  // Begins the thread. Throws ValueError if a stage of the rank is missing.
  Executor(ExecutorSetup setup, std::shared_ptr<Fault> fault);
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // Throws ValueError if the executor does not run the stage.
  StageWorker& worker(int stage) const;

  // Receives of runs with this wiring are posted by a plan: see PlannedReceives::plan(). From the
  // submitting thread, before the first run that uses it, or drained.
  void plan_receives(int wiring, const std::vector<StageEdge>& edges,
                     const std::vector<JointUpdate>& joint) {
    receives_.plan(wiring, edges, joint);
  }

  using Ticket = std::int64_t;
  Ticket submit_run(Run run);
  // `apply` makes the stage's next version from the gradients of the batch whose last run `run` is.
  Ticket submit_update(int stage, std::int64_t run, std::function<void(Stage&)> apply);
  // `copy` is called once the stage's `version` has been made: see StageUpdates::copy_after().
  Ticket submit_copy(int stage, std::int64_t version, std::function<void()> copy);
  Ticket submit_drain();
  // Forward only, no gradients, on the newest version. The pipeline must be drained. With two
  // pipelines only the first one evaluates.
  Ticket submit_evaluation(Run run);

  // From the next run on so many of a batch's first forwards are late on each stage; none: all.
  // Drained.
  void set_late_forwards(std::vector<int> late) { setup_.schedule.late_forwards = std::move(late); }
  // Makes every update that is to come wait for the verdict on its batch; null: none does. Drained.
  // See StageUpdates.
  void set_verdicts(const std::shared_ptr<BatchVerdicts>& verdicts);
  // Forgets the discarded batch and all later ones, and runs from that one on. Drained.
  void take_back(std::int64_t batch, std::int64_t run);
  // Batches and runs get numbers that others had, as other versions were loaded. Drained.
  void count_anew();

  // True when everything up to the ticket has been executed, within `timeout`. Throws PipelineError
  // once the pipeline has failed.
  bool wait_for(Ticket ticket, std::chrono::milliseconds timeout);

  // The ticket of the last submission, 0 before the first.
  Ticket last_ticket() const;

  // The calling thread's streams do what the stages' streams have been given until now first: their
  // tensors may be used, or freed.
  void join_here() const;

  // Waits until the devices have done what they were given.
  void wait_for_devices() const;
  // Whether the stage's weights, or buffers that its forwards write to, mean nothing since the
  // fault. After close().
  bool is_spoilt(int stage, bool has_buffers) const;

  // Ends the thread; what has not been executed is dropped.
  void close();
  // After close().
  void drop_connections();

  // Whether actions are recorded from now on. Waits for the copies of inputs to the devices.
  void record(bool on) { log_.record(on, streams_); }
  std::vector<ExecutedAction> take_record() { return log_.take(); }

 private:
  const RankActions& actions() const { return setup_.schedule.ranks.at(setup_.rank); }
  Ticket submit(std::function<void()> command);
  void loop();
  // How many runs before the current one the microbatch is.
  int runs_before(int microbatch) const;
  void begin_run(const Run& run);
  void run_actions(ListKind list, std::int64_t last);
  void execute(const Action& action, const Run& run);
  void drain();
  void finish_updates();
  void evaluate(const Run& run);
  void abort_channels();
  bool is_empty() const;
  struct Doing {
    int stage = 0;
    ActionKind kind = ActionKind::kForward;
    std::int64_t run = 0;
    int microbatch = 0;
    bool evaluating = false;
  };
  // The exception that is being handled, and where it was thrown.
  Failure describe_failure(const Doing& doing) const;
  // Raises the fault with it.
  void fail(const Doing& doing);
  // Discards the batch because of it. False if it is not the user's mistake, or if some stage may
  // have made the batch's update already.
  bool discard(std::int64_t batch, bool has_sent);
  void begin_thread() const;

  ExecutorSetup setup_;
  const std::shared_ptr<Fault> fault_;
  ActionLog log_;
  PlannedReceives receives_{setup_, [this](int stage) -> StageWorker& { return worker(stage); }};
  std::vector<std::unique_ptr<StageWorker>> workers_;
  std::vector<const StageStreams*> streams_;  // of the workers that have a device's, each once

  // Used by the executor's thread alone.
  // The runs since the pipeline was empty, as far as `steady` and `epilogue` go back; runs missing
  // here are finished. If there is one, microbatches may be in flight, and the next run continues
  // with `steady`.
  std::map<std::int64_t, Run> runs_;
  int most_runs_before_ = 0;
  bool has_verdicts_ = false;
  Doing doing_;

  mutable std::mutex mutex_;
  std::condition_variable submitted_, executed_;
  std::deque<std::function<void()>> commands_;
  Ticket last_ticket_ = 0, last_executed_ = 0;
  bool looping_ = false;
  bool closed_ = false;
  std::thread thread_;
};

}  // namespace pd2
