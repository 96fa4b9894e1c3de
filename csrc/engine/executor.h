// One stage's loop over its actions.
#pragma once

#include "core/schedule.h"
#include "engine/batch_loss.h"
#include "engine/channel.h"
#include "engine/fault.h"
#include "engine/message.h"
#include "engine/stage.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace pd2 {

// An edge as its consumer sees it: values come in, their gradients go back.
struct InboundEdge {
  int producer = 0;
  std::shared_ptr<Receiver> values;
  std::shared_ptr<Sender> gradients;
};

// An edge as its producer sees it.
struct OutboundEdge {
  int consumer = 0;
  std::shared_ptr<Sender> values;
  std::shared_ptr<Receiver> gradients;
};

// Edges of one capture of the model; a model captured in two modes may have different ones.
struct Wiring {
  std::vector<InboundEdge> inbound;
  std::vector<OutboundEdge> outbound;
};

// What a stage's forward gets and gives. Tensors of `inbound` require grad as their producers' did;
// those of `outbound` carry the history that leads back to them.
struct ForwardCall {
  std::int64_t run = 0;  // the run that the caller submitted (a batch, or an evaluation)
  int microbatch = 0;
  int slot = 0;  // which weight buffer
  std::vector<Message> inbound;
};
struct ForwardResult {
  std::vector<Message> outbound;  // by edge of the wiring
  at::Tensor loss;                // last stage of a training batch: the microbatch's mean or sum
  std::int64_t bytes_kept = 0;    // activations held for the backward
};
using Forward = std::function<ForwardResult(ForwardCall)>;

// A pass of `layouts.size()` microbatches through the stage.
struct Run {
  std::int64_t id = 0;
  int wiring = 0;
  std::vector<LayoutId> layouts;  // by microbatch
  // By microbatch, weighs the losses' means; empty if losses are sums.
  std::vector<std::int64_t> rows;
};

// An executed action, for logs and timelines. Times are seconds of the steady clock, which all
// processes of one machine share. A backward that sends gradients ends when it does, although the
// last weights' gradients may still be added then.
struct ExecutedAction {
  ActionKind kind;
  std::int64_t batch;
  int microbatch;
  std::int64_t version;  // read by F and B, written by U
  double start;
  double end;
};

struct ExecutorOptions {
  int stage = 0;
  int replica = 0;
  int num_replicas = 1;
  int num_microbatches = 1;
  int delay = 0;
  RankActions actions;
  int num_threads = 0;  // intra-op threads of this executor's thread, 0: as they are
  Forward forward;
  // Gets a batch's loss when its last microbatch has been forwarded; must not take long.
  std::function<void(std::int64_t batch, BatchLoss loss)> on_loss;
  // Runs the loop that it is given, in the executor's thread, with what `forward` needs there.
  std::function<void(const std::function<void()>& loop)> run_thread;
  // The text of an exception that came out of `forward` or a backward (it may be a Python one).
  std::function<std::string(std::exception_ptr)> describe;
};

// Owns a thread that executes what is submitted, in order: training batches (the schedule's
// prologue if the pipeline is empty, else its steady list), updates, drains (the epilogue),
// evaluations. Knows no schedule's name and no Python. submit_* and wait_for may be called from one
// other thread; a submission returns a ticket. The first failure ends the thread, drops what is in
// flight and raises the fault.
//
// An update is executed at the schedule's U if it has been submitted by then, else when it is: the
// user may drain between the backward and opt.step().
class Executor {
 public:
  Executor(ExecutorOptions options, std::shared_ptr<Stage> stage, std::shared_ptr<Fault> fault);
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // Before the first run that uses it.
  void set_wiring(int id, Wiring wiring);

  using Ticket = std::int64_t;
  Ticket submit_batch(Run run);
  // `apply` makes the next version from the batch's gradients and publishes it.
  Ticket submit_update(std::int64_t batch, std::function<void(Stage&)> apply);
  Ticket submit_drain();
  // Forward only, no gradients, on the newest version. The pipeline must be drained.
  Ticket submit_evaluation(Run run);

  // True when everything up to the ticket has been executed, within `timeout`. Throws PipelineError
  // once the pipeline has failed.
  bool wait_for(Ticket ticket, std::chrono::milliseconds timeout);

  // The ticket of the last submission, 0 before the first.
  Ticket last_ticket() const;

  // Ends the thread; what has not been executed is dropped.
  void close();
  // After close(): lets go of the channels and the replicas, and so of their connections.
  void drop_connections() {
    wirings_.clear();
    stage_->drop_replicas();
  }

  void record(bool on);
  std::vector<ExecutedAction> take_record();

  std::int64_t most_bytes_in_flight() const { return most_bytes_in_flight_; }
  int most_in_flight() const { return most_in_flight_; }
  std::int64_t message_buffer_bytes() const;

 private:
  using NodePtr = decltype(torch::autograd::Edge::function);

  // A microbatch between its forward and its backward.
  struct InFlight {
    LayoutId layout = 0;
    int wiring = 0;
    std::int64_t version = 0;
    std::vector<NodePtr> sinks;                               // by inbound edge
    std::vector<std::vector<torch::autograd::Edge>> outputs;  // by outbound edge
    std::vector<bool> expects_gradients;                      // by outbound edge
    std::optional<torch::autograd::Edge> loss;
    at::Tensor loss_seed;
    std::int64_t bytes = 0;
  };

  Ticket submit(std::function<void()> command);
  void expect_values(const Run& run);
  void loop();
  void add_loss(const Run& run, int microbatch, const at::Tensor& loss, InFlight& in_flight);
  void run_actions(const std::vector<Action>& actions, const Run& run);
  void forward(const Run& run, int microbatch);
  void backward(std::int64_t batch, int microbatch);
  void update(std::int64_t batch);
  void apply(std::int64_t batch, const std::function<void(Stage&)>& apply);
  void wait_for_replicas(c10d::Work& work);
  void drain();
  void evaluate(const Run& run);
  ForwardCall receive_values(const Run& run, int microbatch, InFlight* in_flight);
  void send_values(const Run& run, int microbatch, ForwardResult& result, InFlight* in_flight);
  void log(ActionKind kind, std::int64_t batch, int microbatch, std::int64_t version, double start,
           double end);
  void abort_channels();
  std::string where() const;

  const ExecutorOptions options_;
  const std::shared_ptr<Stage> stage_;
  const std::shared_ptr<Fault> fault_;
  std::map<int, Wiring> wirings_;

  // Touched by the executor's thread alone.
  bool running_ = false;  // microbatches may be in flight: the next batch continues with `steady`
  Run last_run_;
  std::int64_t first_batch_ = 0;  // since the pipeline was empty: what precedes it is done
  std::map<std::pair<std::int64_t, int>, InFlight> in_flight_;
  std::map<std::int64_t, std::function<void(Stage&)>> updates_;  // submitted, gradients incomplete
  std::optional<std::int64_t> gradients_ready_;  // batch whose update has not been submitted
  BatchLoss loss_;                               // of the batch's microbatches so far
  std::int64_t bytes_in_flight_ = 0;
  std::atomic<std::int64_t> most_bytes_in_flight_ = 0;
  std::atomic<int> most_in_flight_ = 0;
  struct {
    ActionKind kind = ActionKind::kForward;
    std::int64_t batch = 0;
    int microbatch = 0;
    bool evaluating = false;
  } doing_;

  mutable std::mutex mutex_;
  std::condition_variable submitted_, executed_;
  std::deque<std::function<void()>> commands_;
  Ticket last_ticket_ = 0, last_executed_ = 0;
  bool looping_ = false;
  bool closed_ = false;
  bool recording_ = false;
  std::vector<ExecutedAction> record_;
  std::thread thread_;
};

}  // namespace pd2
