// One pass of microbatches through the stages, and what a stage does for it.
#pragma once

#include "core/schedule/schedule.h"
#include "engine/channels/channel.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace pd2 {

// A pass of `layouts.size()` microbatches through the stages: a train_step, or an evaluation. One
// training run, or several in a row, are a batch, whose gradients are added up for one update.
struct Run {
  std::int64_t id = 0;
  int wiring = 0;
  std::vector<LayoutId> layouts;  // by microbatch, of all pipelines
  // By microbatch, the weights of the losses' means; empty if losses are sums.
  std::vector<std::int64_t> rows;
  std::int64_t batch = 0;  // updates before it
  bool begins_batch = true;
  bool ends_batch = true;
  int num_averaged = 1;  // runs of which the batch's gradient is the mean
};

// The arguments of a stage's forward. Tensors of `inbound` require grad as their producers' did.
struct ForwardCall {
  std::int64_t run = 0;
  int microbatch = 0;
  int slot = 0;  // of the weights
  float loss_scale = 1;
  std::vector<Message> inbound;  // by edge of the wiring
  bool again = false;            // a training forward that has been called before: see recompute
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

// An executed action, for logs and timelines. Times are seconds of the steady clock, which all
// processes of one machine share. A backward that sends gradients ends when it sends them, although
// the gradients of the first weights may still be added then. A forward that was called again is a
// kRecompute.
struct ExecutedAction {
  int stage;
  ActionKind kind;
  std::int64_t run;  // of an update: the last run of its batch
  int microbatch;
  std::int64_t version;  // read by F and B, written by U
  double start;
  double end;
};

}  // namespace pd2
