// One stage at work: what it does for each action, and the microbatches that are in flight there.
#pragma once

#include "core/schedule/schedule.h"
#include "engine/channels/channel.h"
#include "engine/channels/message.h"
#include "engine/loss/batch_loss.h"
#include "engine/run/action_range.h"
#include "engine/run/private_generator.h"
#include "engine/run/split_backward.h"
#include "engine/stage/stage.h"
#include "engine/update/stage_updates.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
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
  float loss_scale = 1;
  std::vector<Message> inbound;
  bool again = false;  // a training forward that has been called before: see recompute
};
struct ForwardResult {
  std::vector<Message> outbound;  // by edge of the wiring
  at::Tensor loss;                // last stage of a training batch: the microbatch's mean or sum
  at::Tensor metrics;             // there, too: its share of the batch's, if there are any
  // Activations held for the backward; of a forward that will be called again, what that needs
  // beside the inbound messages.
  std::int64_t bytes_kept = 0;
};
using Forward = std::function<ForwardResult(ForwardCall)>;

// A pass of `layouts.size()` microbatches through the stage. One training run, or several in a row,
// are a batch, whose gradients are added up for one update.
struct Run {
  std::int64_t id = 0;
  int wiring = 0;
  std::vector<LayoutId> layouts;  // by microbatch, of all pipelines
  // By microbatch, weighs the losses' means; empty if losses are sums.
  std::vector<std::int64_t> rows;
  std::int64_t batch = 0;  // updates before it
  bool begins_batch = true;
  bool ends_batch = true;
  int num_averaged = 1;  // the batch's gradient is the mean of as many runs'
};

// An executed action, for logs and timelines. Times are seconds of the steady clock, which all
// processes of one machine share. A backward that sends gradients ends when it does, although the
// last weights' gradients may still be added then. A forward that was called again is a
// kRecompute.
struct ExecutedAction {
  int stage;
  ActionKind kind;
  std::int64_t run;  // of an update the batch's last
  int microbatch;
  std::int64_t version;  // read by F and B, written by U
  double start;
  double end;
};

struct StageWorkerOptions {
  int stage = 0;
  int num_replicas = 1;
  int num_microbatches = 1;
  // The number in the batch of the stage's first microbatch: with two pipelines each has a part.
  int first_microbatch = 0;
  int delay = 0;
  // The first batches that have no delay, whatever `delay` is.
  std::int64_t warmup_batches = 0;
  // Keep only what a microbatch's forward received, and call it again before its backward (arXiv
  // 1604.06174).
  bool recompute = false;
  bool recomputes_blocks = false;  // parts of the forward do so by themselves
  std::uint64_t seed = 0;          // of the random numbers of forwards that are called again
  Forward forward;
  // Gets a run's loss when its last microbatch has been forwarded; must not take long.
  std::function<void(std::int64_t run, BatchLoss loss)> on_loss;
};

// What its executor gives it.
struct WorkerSurroundings {
  std::function<void(const ExecutedAction&)> log;
  std::function<bool()> is_stopped;    // then nobody waits any longer
  std::function<void()> begin_thread;  // called in a thread that works beside the executor's
  std::function<void(std::int64_t run)> update_failed;  // called while the exception is handled
};

// Used by one executor's thread, but for what says otherwise.
class StageWorker {
 public:
  StageWorker(StageWorkerOptions options, std::shared_ptr<Stage> stage)
      : options_(std::move(options)), stage_(std::move(stage)) {}
  StageWorker(const StageWorker&) = delete;
  StageWorker& operator=(const StageWorker&) = delete;

  int stage() const { return options_.stage; }
  int first_microbatch() const { return options_.first_microbatch; }
  // The version that the batch's microbatches read: v(t) = t in the warm-up of n batches, then
  // max(t - delay, n - 1), so that batch n need not wait for the update of the one before.
  std::int64_t version_of_batch(std::int64_t batch) const;
  // Before the thread begins.
  void set_surroundings(WorkerSurroundings surroundings);

  // From the submitting thread, before the first run that uses it.
  void set_wiring(int id, Wiring wiring);
  // From the submitting thread: values of the run's first `num_microbatches` of this stage.
  void expect_values(const Run& run, int num_microbatches);
  // From any thread.
  void abort_channels();
  // When the thread has ended: lets go of the channels and the replicas, and so of their
  // connections.
  void drop_connections();

  void forward(const Run& run, int microbatch);
  void backward(const Run& run, int microbatch);
  // The two halves of a backward.
  void input_grad(const Run& run, int microbatch);
  void weight_grad(const Run& run, int microbatch);
  // Of the schedule's U, and of what opt.step() asks for.
  StageUpdates& updates() { return *updates_; }
  // Forward only, no gradients, on the newest version.
  void evaluate(const Run& run, int microbatch);

  bool is_empty() const { return in_flight_.empty(); }
  // Forgets everything under way.
  void clear();

  // From any thread.
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
    ForwardCall call;                                         // to be made again
    std::vector<NodePtr> sinks;                               // by inbound edge
    std::vector<std::vector<torch::autograd::Edge>> outputs;  // by outbound edge
    std::vector<bool> expects_gradients;                      // by outbound edge
    torch::autograd::Edge loss;
    at::Tensor loss_seed;
    float loss_scale = 1;
    std::unique_ptr<SplitBackward> split;  // between I and W
    std::vector<HeldGradient> held;        // and the gradients that I gave
    std::int64_t bytes = 0;
  };
  using Backward =
      std::function<void(const torch::autograd::edge_list&, const torch::autograd::variable_list&)>;

  LayoutId layout(const Run& run, int microbatch) const {
    return run.layouts.at(options_.first_microbatch + microbatch);
  }
  ForwardCall receive_values(const Run& run, int microbatch);
  static void add_sinks(ForwardCall& call, InFlight& in_flight);
  void keep_edges(const ForwardResult& result, InFlight& in_flight);
  void send_values(const Run& run, int microbatch, ForwardResult& result, InFlight* in_flight);
  void recompute(std::int64_t run, int microbatch, InFlight& in_flight);
  ForwardResult call_forward(ForwardCall call) const;
  // In the backward of what was or will be run again, while the result lives.
  std::unique_ptr<PrivateGenerator> forbid_drawing() const;
  void count_bytes(InFlight& in_flight, std::int64_t bytes);
  InFlight& in_flight(std::int64_t run, int microbatch);
  // Whether a gradient will come back, or begins here. Where none does and none is waited for by
  // those before (frozen parameters, and only such before), a microbatch keeps nothing: it is never
  // in flight and its backward does nothing.
  static bool is_differentiable(const ForwardResult& result);
  bool skips_backward(ActionKind kind, const Run& run, int microbatch);
  // Receives the gradients of what the microbatch sent, runs `execute` and sends those of what it
  // received.
  void run_backward(ActionKind kind, std::int64_t run, int microbatch, const Backward& execute);
  void begin_gradients(const Run& run, int microbatch);
  void end_flight(std::int64_t run, int microbatch);
  void add_loss(const Run& run, int microbatch, const ForwardResult& result, InFlight& in_flight);
  ActionRange range(ActionKind kind, std::int64_t run, int microbatch, std::int64_t version) const;
  void log(ActionKind kind, std::int64_t run, int microbatch, std::int64_t version, double start,
           double end);

  const StageWorkerOptions options_;
  const std::shared_ptr<Stage> stage_;
  WorkerSurroundings around_;

  mutable std::mutex wirings_mutex_;  // of the map; its entries stay as they are
  std::map<int, Wiring> wirings_;

  std::map<std::pair<std::int64_t, int>, InFlight> in_flight_;  // by run and microbatch
  BatchLoss loss_;                                              // of the run's microbatches so far
  std::int64_t bytes_in_flight_ = 0;
  std::atomic<std::int64_t> most_bytes_in_flight_ = 0;
  std::atomic<int> most_in_flight_ = 0;
  std::unique_ptr<StageUpdates> updates_;  // ends first
};

}  // namespace pd2
