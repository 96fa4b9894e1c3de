// One stage at work: what it does for each action, and the microbatches that are in flight there.
#pragma once

#include "core/schedule/schedule.h"
#include "engine/channels/channel.h"
#include "engine/loss/run_loss.h"
#include "engine/run/action_graphs.h"
#include "engine/run/action_log.h"
#include "engine/run/device_backlog.h"
#include "engine/run/history.h"
#include "engine/run/keyed_random.h"
#include "engine/run/planned_receives.h"
#include "engine/run/run.h"
#include "engine/run/split_backward.h"
#include "engine/run/wiring.h"
#include "engine/stage/stage.h"
#include "engine/update/stage_updates.h"

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace pd2 {

// What a stage's worker has of its executor.
struct WorkerCallbacks {
  ActionLog& log;
  PlannedReceives& receives;  // those that belong to an action's sends are posted before these
  // Called while what the user's code raised is handled. False: it is a fault. `has_sent`: whether
  // another stage may have this one's gradients of the microbatch.
  std::function<bool(std::int64_t batch, bool has_sent)> discard;
};

// Used by one executor's thread; methods that other threads may call say so.
class StageWorker {
 public:
  // `setup` and `mine`, which is one of its stages, must outlive the worker. `updates`: its
  // callbacks but `record`, which the worker adds.
  StageWorker(const ExecutorSetup& setup, const StageSetup& mine, WorkerCallbacks callbacks,
              UpdateCallbacks updates);
  StageWorker(const StageWorker&) = delete;
  StageWorker& operator=(const StageWorker&) = delete;

  int stage() const { return mine_.index; }
  const StageStreams& streams() const { return stage_->streams(); }
  // The number in the run of the stage's first microbatch: each of two pipelines has a part.
  int first_microbatch() const { return first_microbatch_; }
  // The version that the batch's late forwards read: v(t) = t in the warm-up of n batches, then
  // max(t - delay, n - 1), so that batch n need not wait for the update of the one before.
  std::int64_t version_of_batch(std::int64_t batch) const;
  // The one that this microbatch reads: that, or W(t). Of a batch of several runs the first one's
  // forwards are the first.
  std::int64_t version_of(const Run& run, int microbatch) const;

  // From the submitting thread, before the first run that uses it.
  void set_wiring(int id, Wiring wiring) { wirings_.set(id, std::move(wiring)); }
  // From the submitting thread. Announces the values of the stage's first `num_microbatches`.
  void expect_values(const Run& run, int num_microbatches);
  // From any thread.
  const Wirings& wirings() const { return wirings_; }
  // After the thread has ended. Releases the channels and the replicas, and so their connections.
  void drop_connections();

  // Waits for the updates that other stages wait for, too, and without which the action cannot be
  // done: before its receives are posted, where these keep a device busy (see plan_receives()). Of
  // others for those whose replicas must exchange shares before the action.
  void finish_updates_before(ActionKind kind, const Run& run, int microbatch);
  // Begins the transfers of what the action will receive.
  void prepare(ActionKind kind, const Run& run, int microbatch);
  // Begins the transfer of what another stage sends for the microbatch, the next in order: of its
  // values, if the stage comes before, else of its gradients.
  void post(const Run& run, int microbatch, int sender);

  // The next four execute an action; the last two are the halves of a backward. If the batch is
  // discarded, they only receive and send, and neither messages mean anything. If the user's code
  // raises, they discard the batch and go on like that.
  void forward(const Run& run, int microbatch);
  void backward(const Run& run, int microbatch);
  void input_grad(const Run& run, int microbatch);
  void weight_grad(const Run& run, int microbatch);
  StageUpdates& updates() { return updates_; }
  // Forward only, no gradients, on the newest version.
  void evaluate(const Run& run, int microbatch);

  // Lets the device be behind by few microbatches.
  void wait_for_device() { backlog_.wait(); }

  bool is_empty() const { return in_flight_.empty(); }
  // Forgets everything under way.
  void clear();

  // From any thread.
  std::int64_t most_bytes_in_flight() const { return most_bytes_in_flight_; }
  int most_in_flight() const { return most_in_flight_; }
  std::int64_t most_bytes_behind() const { return backlog_.most_bytes(); }
  std::int64_t message_buffer_bytes() const { return wirings_.buffer_bytes(); }
  GraphReport graph_report() const { return graphs_ ? graphs_->report() : GraphReport(); }

 private:
  // A microbatch between its forward and its backward.
  struct InFlight {
    History history;
    ActionGraphs::Use graph;  // if its forward was given to the device as one
    LayoutId layout = 0;
    int wiring = 0;
    std::int64_t version = -1;            // pinned; -1: none
    ForwardCall call;                     // which recompute() repeats
    std::vector<bool> owes_gradients;     // by inbound edge
    std::vector<bool> expects_gradients;  // by outbound edge
    at::Tensor loss_seed;
    float loss_scale = 1;
    std::optional<std::uint64_t> random_key;
    std::unique_ptr<SplitBackward> split;  // between I and W
    std::vector<HeldGradient> held;        // the gradients of weights that I computed
    std::int64_t bytes = 0;
    std::int64_t message_bytes = 0;  // of what it has received
  };

  LayoutId layout(const Run& run, int microbatch) const {
    return run.layouts.at(first_microbatch_ + microbatch);
  }
  // Nothing is computed of it, sent or received.
  bool is_absent(const Run& run, int microbatch) const {
    return layout(run, microbatch) == Run::kAbsent;
  }
  int last_microbatch() const { return setup_.schedule.num_microbatches - 1; }
  bool is_discarded(const Run& run) const {
    return setup_.discards && setup_.discards->covers(run.batch);
  }
  // Calls `user_code`; false if it raised something, and the batch is discarded. `has_sent`: see
  // WorkerCallbacks.
  template <typename UserCode>
  bool attempt(
      const Run& run, UserCode user_code,
      const std::function<bool()>& has_sent = [] { return false; }) const;
  // Learns from a message that is void.
  void look_at(const Message& message, const Run& run) const;
  ForwardCall receive_values(const Run& run, int microbatch, InFlight& in_flight) const;
  // What forward() does for a microbatch that is not absent.
  void forward_present(const Run& run, int microbatch);
  // What that does between receiving and sending; none if the batch is discarded.
  std::optional<ForwardResult> compute(const Run& run, int microbatch, ForwardCall call,
                                       InFlight& in_flight);
  // `is_only`: the action sends nothing else.
  // `result` becomes none if it cannot be sent.
  void send_values(const Run& run, int microbatch, std::optional<ForwardResult>& result,
                   InFlight* in_flight);
  // Of a discarded microbatch nothing is needed but which messages are still to come and go.
  void release(InFlight& in_flight);
  void recompute(std::int64_t run, int microbatch, InFlight& in_flight);
  // The key of a microbatch's random numbers; none: they are torch's own.
  std::optional<std::uint64_t> random_key(const Run& run, int microbatch) const;
  // While the result lives, this thread draws by the key. In a backward that is what a checkpoint
  // of the model's own runs again, which sets its place, and what draws there by itself.
  KeyedRandom draw_by(std::optional<std::uint64_t> key, ActionKind kind) const;
  ForwardResult call_forward(ForwardCall call, std::optional<std::uint64_t> key) const;
  // A forward of a train_step.
  ForwardResult run_forward(const Run& run, ForwardCall call, InFlight& in_flight);
  void count_bytes(InFlight& in_flight, std::int64_t bytes);
  InFlight& in_flight(std::int64_t run, int microbatch);
  // Whether a gradient will come back, or begins here. If not, and if no stage before waits for a
  // gradient (all parameters up to here are frozen), the microbatch keeps nothing: it is never in
  // flight and its backward does nothing.
  static bool is_differentiable(const ForwardResult& result);
  bool skips_backward(ActionKind kind, const Run& run, int microbatch);
  // Receives the gradients of the values that the microbatch sent, runs `execute` and sends the
  // gradients of the values that it received.
  void run_backward(ActionKind kind, const Run& run, int microbatch,
                    const std::function<void(const Incoming&)>& execute);
  // The outbound gradients of a microbatch; none if the batch is discarded.
  Incoming receive_gradients(const Run& run, InFlight& in_flight) const;
  void begin_gradients(const Run& run, int microbatch);
  bool lets_sums_begin(const Run& run, int microbatch) const;
  void end_flight(std::int64_t run, int microbatch);
  void add_loss(const Run& run, int microbatch, const ForwardResult& result, InFlight& in_flight);
  // What the microbatch's backward begins with: the loss's weight in the batch, times the scale.
  // Made once, as on a device it takes several kernels.
  at::Tensor loss_seed(const Run& run, int microbatch, const at::Tensor& loss, float scale);
  void hand_over_loss(const Run& run);
  ExecutedAction begin(ActionKind kind, std::int64_t run, int microbatch,
                       std::int64_t version) const;
  UpdateCallbacks with_record(UpdateCallbacks callbacks);

  const ExecutorSetup& setup_;
  const StageSetup& mine_;
  const std::shared_ptr<Stage> stage_ = mine_.stage;
  const int first_microbatch_;
  const WorkerCallbacks callbacks_;
  const std::unique_ptr<ActionGraphs> graphs_;  // if actions may be recorded
  // By channel and layout: whether the messages sent so far have gradients that come back.
  std::map<std::pair<const Sender*, LayoutId>, bool> have_gradients_;
  Wirings wirings_;
  std::map<std::pair<std::int64_t, int>, InFlight> in_flight_;  // by run and microbatch
  RunLoss loss_;                                                // of the run's microbatches so far
  // Dtype, dimensions, the run's weight and number, divisor, factor and scale.
  using SeedKey =
      std::tuple<at::ScalarType, std::int64_t, double, int, std::int64_t, double, float>;
  std::map<SeedKey, at::Tensor> seeds_;
  std::int64_t bytes_in_flight_ = 0;
  std::atomic<std::int64_t> most_bytes_in_flight_ = 0;
  std::atomic<int> most_in_flight_ = 0;
  DeviceBacklog backlog_;
  StageUpdates updates_;  // ends first
};

template <typename UserCode>
bool StageWorker::attempt(const Run& run, UserCode user_code,
                          const std::function<bool()>& has_sent) const {
  try {
    user_code();
    return true;
  } catch (...) {
    if (!callbacks_.discard(run.batch, has_sent())) {
      throw;
    }
    return false;
  }
}

}  // namespace pd2
