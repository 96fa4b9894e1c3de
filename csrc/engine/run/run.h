// What an executor is made from, one pass of microbatches through its stages, and what these do.
#pragma once

#include "core/schedule/schedule.h"
#include "engine/channels/channel.h"
#include "engine/discards.h"
#include "engine/fault.h"
#include "engine/loss/run_loss.h"
#include "engine/stage/stage.h"
#include "engine/streams.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace pd2 {

// A pass of `layouts.size()` microbatches through the stages: a train_step, or an evaluation. One
// training run, or several in a row, are a batch, whose gradients are added up for one update.
struct Run {
  static constexpr LayoutId kAbsent = -1;

  std::int64_t id = 0;
  int wiring = 0;
  // By microbatch, of all pipelines; kAbsent: this run has no such microbatch. Those of a pipeline
  // that are absent are its last, and never all.
  std::vector<LayoutId> layouts;
  LossWeights loss_weights{};
  std::int64_t batch = 0;  // updates before it; an evaluation's comes after all that have begun
  bool begins_batch = true;
  bool ends_batch = true;
  int num_averaged = 1;               // runs of which the batch's gradient is the mean
  double replica_weight = 1;          // of the losses in the gradients that replicas add up
  std::int64_t first_microbatch = 0;  // how many microbatches the replicas before have
  // Of the random numbers that training draws, on all ranks the same; none: they are torch's own.
  std::optional<std::uint64_t> seed = std::nullopt;
};

// The arguments of a stage's forward. Tensors of `inbound` require grad as their producers' did.
struct ForwardCall {
  std::int64_t run = 0;
  int microbatch = 0;
  int slot = 0;  // of the weights
  float loss_scale = 1;
  std::vector<Message> inbound;  // by edge of the wiring
  bool again = false;            // a training forward that has been called before: see recompute
  // In place of the tensors that the microbatch is given beside the messages, while the forward is
  // recorded; none: it takes those.
  std::optional<std::vector<at::Tensor>> given = std::nullopt;
};

// What a forward is given beside the messages.
struct GivenInputs {
  std::vector<at::Tensor> tensors;
  std::int64_t kind = 0;  // of all else that it depends on; equal numbers, equal values
  std::string refusal;    // why it cannot be recorded; empty: it may be
};

// The result of a stage's forward. Tensors of `outbound` carry the history that leads back to the
// inbound ones.
struct ForwardResult {
  std::vector<Message> outbound;  // by edge of the wiring
  at::Tensor loss;                // last stage of a training run: the microbatch's mean or sum
  at::Tensor metrics;             // of the same: the microbatch's share of the run's, if any
  // Activations held for the backward. If the forward will be called again: what that call needs
  // in addition to the inbound messages.
  std::int64_t bytes_kept = 0;
};

using Forward = std::function<ForwardResult(ForwardCall)>;

// How actions are recorded as a device's graphs.
struct GraphSetup {
  bool always = false;  // all of them; false: those that can be
  // Called before `forward` for each microbatch of a train_step, which need not be called then.
  // Null: none is recorded.
  std::function<GivenInputs(const ForwardCall&)> look;
  std::int64_t most_bytes = std::numeric_limits<std::int64_t>::max();  // of the graphs' memory
  // Describes an exception that ended a recording, also a Python one, which is over then.
  std::function<std::string(const std::exception_ptr& error)> cause_of =
      [](const std::exception_ptr& error) { return failure_of(error, 0).cause; };
};

// A stage that a rank runs.
struct StageSetup {
  int index = 0;  // the schedule's
  std::shared_ptr<Stage> stage;
  Forward forward;
  // Keep only what a microbatch's forward received, and call it again before its backward (arXiv
  // 1604.06174).
  bool recompute = false;
  GraphSetup graphs{};
};

// What an executor is made from: a rank's part of a schedule, and the stages that it runs.
struct ExecutorSetup {
  Schedule schedule;
  int rank = 0;  // of the schedule's
  int replica = 0;
  int num_replicas = 1;
  // The first batches, each of which begins with an empty pipeline and all updates made: they have
  // no delay, whatever the schedule's is.
  std::int64_t warmup_batches = 0;
  int num_threads = 0;             // intra-op threads of the executor's thread, 0: as they are
  std::vector<StageSetup> stages;  // those in the rank's lists, each once
  // Gets a run's loss, of one pipeline, when its last microbatch has been forwarded; must not take
  // long.
  std::function<void(std::int64_t run, RunLoss loss, int pipeline)> on_loss;
  // Calls `loop` in the executor's thread, with what forwards need in a thread.
  std::function<void(const std::function<void()>& loop)> run_thread =
      [](const std::function<void()>& loop) { loop(); };
  // What the user's code raises in a batch discards that; null: it is a fault.
  std::shared_ptr<Discards> discards;
  // Whether all stages learn of a discarded batch before they get a message of it.
  bool discards_reach_all = true;
  // failure_of() for exceptions that come out of a forward or a backward, also Python ones.
  std::function<Failure(const std::exception_ptr& error, int here)> describe = failure_of;
};

}  // namespace pd2
