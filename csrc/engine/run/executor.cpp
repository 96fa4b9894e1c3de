#include "engine/run/executor.h"

#include "core/check.h"
#include "engine/run/rest.h"
#include "engine/this_thread.h"
#include "transport/peer_error.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <ranges>
#include <stdexcept>
#include <typeinfo>
#include <utility>

namespace pd2 {
namespace {

// Whether the stage is the first pipeline's.
bool evaluates(const std::unique_ptr<StageWorker>& worker) {
  return worker->first_microbatch() == 0;
}

// Whether the exception that is being handled comes out of the user's code, as far as its type
// tells.
bool is_of_users_code() {
  try {
    throw;
  } catch (const ChannelAborted&) {
    return false;
  } catch (const PeerError&) {
    return false;
  } catch (const std::logic_error& error) {
    return typeid(error) != typeid(std::logic_error);  // PD2_ASSERT's
  } catch (...) {
    return true;
  }
}

}  // namespace

Executor::Executor(ExecutorSetup setup, std::shared_ptr<Fault> fault)
    : setup_(std::move(setup)), fault_(std::move(fault)) {
  for (const StageSetup& each : setup_.stages) {
    UpdateCallbacks updates;
    updates.begin_thread = [this, stage = each.index] {
      name_this_thread("pd2 update " + std::to_string(stage));
      begin_thread();
    };
    updates.is_stopped = [this] {
      const std::lock_guard lock(mutex_);
      return closed_ || fault_->raised();
    };
    updates.failed = [this, stage = each.index](std::int64_t run) {
      fail({stage, ActionKind::kUpdate, run, setup_.schedule.num_microbatches - 1, false});
    };
    updates.discards = setup_.discards;
    WorkerCallbacks callbacks{log_, receives_, [this](std::int64_t batch, bool has_sent) {
                                return discard(batch, has_sent);
                              }};
    workers_.push_back(
        std::make_unique<StageWorker>(setup_, each, std::move(callbacks), std::move(updates)));
    const StageStreams* streams = &workers_.back()->streams();
    if (streams->compute && std::ranges::find(streams_, streams) == streams_.end()) {
      streams_.push_back(streams);
    }
  }
  for (const auto* list : {&actions().prologue, &actions().steady, &actions().epilogue}) {
    for (const Action& action : *list) {
      worker(action.stage);
      most_runs_before_ = std::max(most_runs_before_, runs_before(action.microbatch));
    }
  }
  const auto end_waiting = [this] {
    abort_channels();
    const std::lock_guard lock(mutex_);
    submitted_.notify_all();
    executed_.notify_all();
  };
  fault_->on_raise(this, end_waiting, [this](auto until) { come_to_rest(workers_, until); });
  thread_ = std::thread([this] { setup_.run_thread([this] { loop(); }); });
  // The loop begins by setting its thread's intra-op threads, which also sets the process's
  // default: the caller may set that back once the constructor has returned.
  std::unique_lock lock(mutex_);
  executed_.wait(lock, [this] { return looping_; });
}

Executor::~Executor() {
  fault_->forget(this);
  close();
}

StageWorker& Executor::worker(int stage) const {
  for (const auto& worker : workers_) {
    if (worker->stage() == stage) {
      return *worker;
    }
  }
  detail::throw_value_error(
      detail::concat("stage: ", stage, ", rank: ", setup_.rank, ": the rank does not run it"));
}

void Executor::drop_connections() {
  for (const auto& worker : workers_) {
    worker->drop_connections();
  }
}

Executor::Ticket Executor::submit(std::function<void()> command) {
  fault_->rethrow_if_raised();
  // What the calling thread's streams of each device, and the streams of its inputs, had been
  // given.
  std::vector<std::array<Fence, 2>> given;
  for (const StageStreams* each : streams_) {
    given.push_back({Fence::here(each->device), Fence::of(each->inputs)});
  }
  auto after_caller = [this, given = std::move(given), command = std::move(command)] {
    for (std::size_t i = 0; i < streams_.size(); ++i) {
      for (const Fence& fence : given[i]) {
        fence.hold_back(streams_[i]->compute);
      }
    }
    command();
  };
  Ticket ticket;
  {
    const std::lock_guard lock(mutex_);
    commands_.push_back(std::move(after_caller));
    ticket = ++last_ticket_;
  }
  submitted_.notify_one();
  return ticket;
}

Executor::Ticket Executor::submit_run(Run run) {
  const auto m = static_cast<std::size_t>(setup_.schedule.total_microbatches());
  PD2_ASSERT(run.layouts.size() == m, run.layouts.size(), " microbatches");
  const std::size_t factors = run.loss_weights.factors.size();
  PD2_ASSERT(factors == 0 || factors == m, factors, " factors");
  for (const auto& worker : workers_) {
    worker->expect_values(run, setup_.schedule.num_microbatches);
  }
  return submit([this, run = std::move(run)] { begin_run(run); });
}

Executor::Ticket Executor::submit_update(int stage, std::int64_t run,
                                         std::function<void(Stage&)> apply) {
  return submit([this, &worker = worker(stage), run, apply = std::move(apply)] {
    const OnStream guard(worker.streams().compute);
    doing_ = {worker.stage(), ActionKind::kUpdate, run, setup_.schedule.num_microbatches - 1,
              false};
    worker.updates().submit(run, apply);
    const auto is_due = [](const auto& each) { return each->updates().is_due(); };
    if (runs_.empty() && std::ranges::none_of(workers_, is_due)) {  // drained: weights may be read
      finish_updates();  // when all have begun, as some may wait for others of this rank
    }
  });
}

Executor::Ticket Executor::submit_copy(int stage, std::int64_t version,
                                       std::function<void()> copy) {
  return submit([&worker = worker(stage), version, copy = std::move(copy)] {
    worker.updates().copy_after(version, copy);
  });
}

Executor::Ticket Executor::submit_drain() {
  return submit([this] { drain(); });
}

Executor::Ticket Executor::submit_evaluation(Run run) {
  for (const auto& worker : workers_ | std::views::filter(&evaluates)) {
    worker->expect_values(run, static_cast<int>(run.layouts.size()));
  }
  return submit([this, run = std::move(run)] { evaluate(run); });
}

bool Executor::wait_for(Ticket ticket, std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  executed_.wait_for(lock, timeout, [&] { return last_executed_ >= ticket || fault_->raised(); });
  if (last_executed_ >= ticket) {
    return true;
  }
  lock.unlock();
  fault_->rethrow_if_raised();
  return false;
}

Executor::Ticket Executor::last_ticket() const {
  const std::lock_guard lock(mutex_);
  return last_ticket_;
}

void Executor::close() {
  bool is_done = false;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    is_done = last_executed_ == last_ticket_;
  }
  submitted_.notify_all();
  abort_channels();
  if (!is_done && !fault_->raised()) {  // what others were to send may never come
    come_to_rest(workers_, std::chrono::steady_clock::now());
  }
  fault_->wait_for_rest();  // before the channels go that tell what came
  if (thread_.joinable()) {
    thread_.join();
    join_here();
  }
}

void Executor::abort_channels() {
  for (const auto& worker : workers_) {
    worker->wirings().abort();
  }
}

void Executor::wait_for_devices() const {
  for (const StageStreams* each : streams_) {
    each->wait();
  }
}

bool Executor::is_spoilt(int stage, bool has_buffers) const {
  const DeviceWork& work = *worker(stage).updates().work();
  return work.is_spoilt() || (has_buffers && work.is_cut_off());
}

bool Executor::is_empty() const {
  return std::ranges::all_of(workers_, [](const auto& worker) { return worker->is_empty(); });
}

void Executor::begin_thread() const {
  if (setup_.num_threads > 0) {
    at::get_num_threads();  // the first call in a thread takes the process's default: make it now
    at::set_num_threads(setup_.num_threads);
  }
}

void Executor::set_verdicts(const std::shared_ptr<BatchVerdicts>& verdicts) {
  has_verdicts_ = verdicts != nullptr;
  for (const auto& worker : workers_) {
    worker->updates().set_verdicts(verdicts, workers_.size() == 1);
  }
}

void Executor::take_back(std::int64_t batch, std::int64_t run) {
  for (const auto& worker : workers_) {
    worker->updates().take_back(batch, run);
  }
  for (const auto& worker : workers_) {
    worker->updates().finish();
  }
}

void Executor::count_anew() {
  for (const auto& worker : workers_) {
    worker->updates().count_anew();
  }
}

bool Executor::discard(std::int64_t batch, bool has_sent) {
  // Who has done its backward has without verdicts perhaps made its update: a later stage, and an
  // earlier one that has the gradients.
  const bool is_before_updates = doing_.evaluating || doing_.kind == ActionKind::kForward ||
                                 (setup_.schedule.is_last(doing_.stage) && !has_sent);
  if (!setup_.discards || (!has_verdicts_ && !(is_before_updates && setup_.discards_reach_all)) ||
      !is_of_users_code()) {
    return false;
  }
  setup_.discards->discard(batch, describe_failure(doing_));
  return true;
}

Failure Executor::describe_failure(const Doing& doing) const {
  const Schedule& schedule = setup_.schedule;
  Failure failure = setup_.describe(std::current_exception(), fault_->rank());
  failure.stage = doing.stage % schedule.depth();
  failure.replica = setup_.replica;
  if (!doing.evaluating) {
    failure.batch = doing.run;
  }
  failure.microbatch = schedule.number_in_batch(doing.stage, doing.microbatch);
  failure.action = name_of(doing.kind);
  failure.text = stage_name(*failure.stage, setup_.replica, setup_.num_replicas);
  if (schedule.num_pipelines > 1) {
    failure.text += detail::concat(" in pipeline ", schedule.pipeline(doing.stage));
  }
  failure.text += doing.evaluating ? ", evaluation" : detail::concat(", batch ", doing.run);
  failure.text += detail::concat(", microbatch ", *failure.microbatch, ", ", *failure.action, ": ",
                                 failure.cause);
  return failure;
}

void Executor::fail(const Doing& doing) { fault_->raise(describe_failure(doing)); }

void Executor::loop() {
  name_this_thread("pd2 stage " + std::to_string(workers_.front()->stage()));
  begin_thread();
  const OnStream guard(workers_.front()->streams().compute);
  doing_.stage = workers_.front()->stage();
  {
    const std::lock_guard lock(mutex_);
    looping_ = true;
  }
  executed_.notify_all();
  try {
    while (true) {
      std::function<void()> command;
      {
        std::unique_lock lock(mutex_);
        submitted_.wait(lock, [&] { return closed_ || fault_->raised() || !commands_.empty(); });
        if (closed_ || fault_->raised()) {
          break;
        }
        command = std::move(commands_.front());
        commands_.pop_front();
      }
      command();
      command = nullptr;
      {
        const std::lock_guard lock(mutex_);
        ++last_executed_;
      }
      executed_.notify_all();
    }
  } catch (const ChannelAborted&) {
    // Another one's failure, or close().
  } catch (...) {
    fail(doing_);
  }
  for (const auto& worker : workers_) {
    worker->clear();
  }
}

int Executor::runs_before(int microbatch) const {
  // Microbatch numbers count from this run's first; negative ones are the previous runs'.
  const int m = setup_.schedule.num_microbatches;
  return microbatch < 0 ? (m - 1 - microbatch) / m : 0;
}

void Executor::begin_run(const Run& run) {
  if (run.batch < setup_.warmup_batches) {
    drain();
  }
  const bool continues = !runs_.empty() && runs_.rbegin()->second.wiring == run.wiring;
  PD2_ASSERT(continues || is_empty(), "the wiring changed with microbatches in flight");
  if (!continues) {
    runs_.clear();
  }
  runs_.emplace(run.id, run);
  runs_.erase(runs_.begin(), runs_.lower_bound(run.id - most_runs_before_));
  run_actions(continues ? ListKind::kSteady : ListKind::kPrologue, run.id);
}

void Executor::run_actions(ListKind list, std::int64_t last) {
  const auto find = [&](int& microbatch) -> const Run* {
    const int before = runs_before(microbatch);
    microbatch += before * setup_.schedule.num_microbatches;
    const auto place = runs_.find(last - before);
    return place == runs_.end() ? nullptr : &place->second;
  };
  receives_.begin(runs_.rbegin()->second.wiring, list, find);
  const std::vector<Action>& actions = pd2::actions(this->actions(), list);
  for (int i = 0; i < static_cast<int>(actions.size()); ++i) {
    Action action = actions[i];
    const Run* run = find(action.microbatch);
    const OnStream guard(worker(action.stage).streams().compute);
    if (run) {
      doing_ = {action.stage, action.kind, run->id, action.microbatch, false};
    }
    receives_.begin_action(i, run, action);
    if (run) {
      worker(action.stage).prepare(action.kind, *run, action.microbatch);
      execute(action, *run);
    }
    receives_.end_action();
    worker(action.stage).wait_for_device();
  }
  receives_.begin_action(static_cast<int>(actions.size()));
}

void Executor::execute(const Action& action, const Run& run) {
  const int microbatch = action.microbatch;
  StageWorker& worker = this->worker(action.stage);
  switch (action.kind) {
    case ActionKind::kForward:
      worker.forward(run, microbatch);
      break;
    case ActionKind::kBackward:
      worker.backward(run, microbatch);
      break;
    case ActionKind::kUpdate:
      if (run.ends_batch) {
        worker.updates().reach(run.id, run.batch);
      }
      break;
    case ActionKind::kInputGrad:
      worker.input_grad(run, microbatch);
      break;
    case ActionKind::kWeightGrad:
      worker.weight_grad(run, microbatch);
      break;
    case ActionKind::kRecompute:
      PD2_ASSERT(false, "no schedule has ", to_string(action));
  }
}

void Executor::drain() {
  if (!runs_.empty()) {
    run_actions(ListKind::kEpilogue, runs_.rbegin()->first);
    PD2_ASSERT(is_empty(), "the epilogue left microbatches in flight");
  }
  finish_updates();  // a copy may be under way even if no run has begun since the last drain
  runs_.clear();
}

void Executor::finish_updates() {
  for (const auto& worker : workers_) {
    worker->updates().settle();
  }
}

void Executor::evaluate(const Run& run) {
  PD2_ASSERT(is_empty(), "evaluation needs a drained pipeline");
  // Microbatch by microbatch: a channel holds a limited number of unreceived messages.
  for (int number = 0; number < static_cast<int>(run.layouts.size()); ++number) {
    receives_.begin(run.wiring, std::nullopt, [&](int& microbatch) {
      microbatch = number;
      return &run;
    });
    int action = 0;
    for (const auto& worker : workers_ | std::views::filter(&evaluates)) {
      const OnStream guard(worker->streams().compute);
      doing_ = {worker->stage(), ActionKind::kForward, run.id, number, true};
      receives_.begin_action(action++);
      worker->prepare(ActionKind::kForward, run, number);
      worker->evaluate(run, number);
      receives_.end_action();
      worker->wait_for_device();
    }
  }
}

void Executor::join_here() const {
  for (const StageStreams* each : streams_) {
    each->join_here();
  }
}

}  // namespace pd2
