#include "engine/run/stage_worker.h"

#include "core/check.h"
#include "engine/clock.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full_like.h>

#include <algorithm>

namespace pd2 {
namespace {

// Different ones, of which a run has one or two unless its microbatches' rows differ.
constexpr std::size_t kMostSeeds = 64;

}  // namespace

StageWorker::StageWorker(const ExecutorSetup& setup, const StageSetup& mine,
                         WorkerCallbacks callbacks, UpdateCallbacks updates)
    : setup_(setup),
      mine_(mine),
      first_microbatch_(setup.schedule.number_in_batch(mine.index, 0)),
      callbacks_(std::move(callbacks)),
      graphs_(ActionGraphs::of(setup, mine)),
      updates_(*stage_, with_record(std::move(updates))) {}

UpdateCallbacks StageWorker::with_record(UpdateCallbacks callbacks) {
  callbacks.record = [this](std::int64_t run, std::int64_t version,
                            const std::function<void()>& update) {
    const ExecutedAction action = begin(ActionKind::kUpdate, run, last_microbatch(), version);
    {
      const ActionRange range(action);
      update();
    }
    callbacks_.log.end(action);
  };
  return callbacks;
}

std::int64_t StageWorker::version_of_batch(std::int64_t batch) const {
  return std::max(stage_->versions().version_of_batch(batch, setup_.schedule.delay.at(mine_.index)),
                  std::min(batch, setup_.warmup_batches - 1));
}

std::int64_t StageWorker::version_of(const Run& run, int microbatch) const {
  const Schedule& schedule = setup_.schedule;
  const bool is_late = run.begins_batch ? schedule.delay_of(mine_.index, microbatch) > 0
                                        : schedule.late_forwards.empty();
  return is_late ? version_of_batch(run.batch) : stage_->versions().version_of_batch(run.batch, 0);
}

void StageWorker::expect_values(const Run& run, int num_microbatches) {
  for (const EdgeEnd& edge : wirings_.at(run.wiring).inbound) {
    for (int microbatch = 0; microbatch < num_microbatches; ++microbatch) {
      if (!is_absent(run, microbatch)) {
        edge.receiver->expect(layout(run, microbatch));
      }
    }
  }
}

void StageWorker::drop_connections() {
  wirings_.clear();
  stage_->gradients().drop_connections();
  updates_.drop_connections();
}

void StageWorker::clear() {
  updates_.end();
  in_flight_.clear();
  backlog_.clear();
  loss_ = {};
  if (graphs_) {
    graphs_->clear();
  }
}

void StageWorker::look_at(const Message& message, const Run& run) const {
  if (message.is_void) {
    PD2_ASSERT(setup_.discards, "a message is void, and no batch can be");
    setup_.discards->discard(run.batch);
  }
}

ForwardCall StageWorker::receive_values(const Run& run, int microbatch, InFlight& in_flight) const {
  ForwardCall call;
  call.run = run.id;
  call.microbatch = microbatch;
  for (const EdgeEnd& edge : wirings_.at(run.wiring).inbound) {
    call.inbound.push_back(edge.receiver->receive());
    look_at(call.inbound.back(), run);
    in_flight.message_bytes += call.inbound.back().bytes();
    in_flight.owes_gradients.push_back(call.inbound.back().differentiable());
  }
  return call;
}

void StageWorker::send_values(const Run& run, int microbatch, std::optional<ForwardResult>& result,
                              InFlight* in_flight) {
  const Wiring& wiring = wirings_.at(run.wiring);
  PD2_ASSERT(!result || result->outbound.size() == wiring.outbound.size(),
             "a message for each edge");
  const LayoutId layout = this->layout(run, microbatch);
  std::vector<Message> messages(wiring.outbound.size());
  for (std::size_t e = 0; e < messages.size(); ++e) {
    Sender& channel = *wiring.outbound[e].sender;
    Message& message = messages[e];
    bool expects_gradients = false;
    const auto prepare = [&] {
      message = std::move(result->outbound[e]);
      message.requires_grad.clear();
      for (at::Tensor& tensor : message.tensors) {
        message.requires_grad.push_back(in_flight && tensor.requires_grad());
        tensor = tensor.tensor_data();
      }
      expects_gradients = message.differentiable();
      channel.prepare(layout, message);
    };
    if (result && attempt(run, prepare)) {
      have_gradients_[{&channel, layout}] = expects_gradients;
    } else {
      result.reset();
      const auto known = have_gradients_.find({&channel, layout});
      expects_gradients = known != have_gradients_.end() && known->second;
      message = {};
      message.is_void = true;
      message.requires_grad = {expects_gradients};
      channel.prepare(layout, message);
    }
    if (in_flight) {
      in_flight->expects_gradients.push_back(expects_gradients);
    }
    if (expects_gradients) {
      wiring.outbound[e].receiver->expect(layout);
    }
  }
  callbacks_.receives.post_with_sends();
  for (std::size_t e = 0; e < messages.size(); ++e) {
    wiring.outbound[e].sender->send(layout, std::move(messages[e]));
  }
}

void StageWorker::add_loss(const Run& run, int microbatch, const ForwardResult& result,
                           InFlight& in_flight) {
  const at::Tensor& loss = result.loss;
  if (microbatch == 0) {
    loss_ = {};  // of a discarded run
    loss_.weights = run.loss_weights;
    loss_.first = first_microbatch_;
  }
  if (loss.requires_grad()) {
    in_flight.loss_seed = loss_seed(run, microbatch, loss, in_flight.loss_scale);
  }
  loss_.losses.push_back(loss.tensor_data());
  if (result.metrics.defined()) {
    loss_.metrics = loss_.metrics.defined() ? loss_.metrics + result.metrics : result.metrics;
  }
}

at::Tensor StageWorker::loss_seed(const Run& run, int microbatch, const at::Tensor& loss,
                                  float scale) {
  const LossWeights& weights = loss_.weights;
  const std::size_t number = loss_.first + microbatch;
  const SeedKey key{loss.scalar_type(),
                    loss.dim(),
                    run.replica_weight,
                    run.num_averaged,
                    weights.divisor,
                    weights.factors.empty() ? 0 : weights.factors.at(number),
                    scale};
  if (seeds_.size() > kMostSeeds) {
    seeds_.clear();
  }
  at::Tensor& seed = seeds_[key];
  if (!seed.defined()) {
    seed = at::full_like(loss, run.replica_weight).detach();
    if (run.num_averaged > 1) {
      seed = seed / static_cast<std::int64_t>(run.num_averaged);
    }
    seed = weights.weighted(seed, number);
    seed = scale == 1 ? seed : seed * scale;
  }
  return seed;
}

void StageWorker::hand_over_loss(const Run& run) {
  RunLoss loss;
  if (is_discarded(run)) {
    loss.is_discarded = true;
  } else {
    loss = std::exchange(loss_, {});
    loss.ready = Fence::of(stage_->streams().compute);
    loss.stream = stage_->streams().losses;
  }
  setup_.on_loss(run.id, std::move(loss), setup_.schedule.pipeline(mine_.index));
}

void StageWorker::finish_updates_before(ActionKind kind, const Run& run, int microbatch) {
  const bool reads_or_updates = kind == ActionKind::kForward
                                    ? version_of(run, microbatch) > stage_->versions().newest()
                                    : kind == ActionKind::kUpdate && run.ends_batch;
  // The next batch's sums begin in its last backward, when replicas have exchanged their shares.
  const bool lets_sums_begin = (kind == ActionKind::kBackward || kind == ActionKind::kWeightGrad) &&
                               this->lets_sums_begin(run, microbatch) &&
                               stage_->gradients().exchanges_in_order();
  if (updates_.are_joint() ? reads_or_updates : lets_sums_begin) {
    updates_.finish();
  }
}

void StageWorker::prepare(ActionKind kind, const Run& run, int microbatch) {
  if (is_absent(run, microbatch)) {
    return;
  }
  const Wiring& wiring = wirings_.at(run.wiring);
  if (kind == ActionKind::kForward) {
    for (const EdgeEnd& edge : wiring.inbound) {
      edge.receiver->prepare();
    }
  } else if (kind == ActionKind::kBackward || kind == ActionKind::kInputGrad) {
    const auto in_flight = in_flight_.find({run.id, microbatch});
    for (std::size_t e = 0; e < wiring.outbound.size() && in_flight != in_flight_.end(); ++e) {
      if (in_flight->second.expects_gradients[e]) {
        wiring.outbound[e].receiver->prepare();
      }
    }
  }
}

void StageWorker::post(const Run& run, int microbatch, int sender) {
  if (is_absent(run, microbatch)) {
    return;
  }
  const Wiring& wiring = wirings_.at(run.wiring);
  for (const EdgeEnd& edge : wiring.inbound) {
    if (edge.other == sender) {
      edge.receiver->post();
    }
  }
  const auto in_flight = in_flight_.find({run.id, microbatch});
  for (std::size_t e = 0; e < wiring.outbound.size() && in_flight != in_flight_.end(); ++e) {
    if (wiring.outbound[e].other == sender && in_flight->second.expects_gradients[e]) {
      wiring.outbound[e].receiver->post();
    }
  }
}

void StageWorker::forward(const Run& run, int microbatch) {
  if (!is_absent(run, microbatch)) {
    forward_present(run, microbatch);
  }
  if (setup_.schedule.is_last(mine_.index) && microbatch == last_microbatch()) {
    hand_over_loss(run);
  }
}

void StageWorker::forward_present(const Run& run, int microbatch) {
  // From here on, as receives of its gradients may begin before its values are sent.
  InFlight& in_flight = in_flight_[{run.id, microbatch}];
  in_flight.layout = layout(run, microbatch);
  in_flight.wiring = run.wiring;
  ForwardCall call = receive_values(run, microbatch, in_flight);
  std::optional<ForwardResult> result;
  if (!is_discarded(run)) {
    result = compute(run, microbatch, std::move(call), in_flight);
  }
  const bool has_result = result.has_value();
  const bool has_graph = has_result && is_differentiable(*result);
  send_values(run, microbatch, result, &in_flight);
  if (has_result && !result) {
    release(in_flight);
  }
  const auto any = [](const std::vector<bool>& of_edges) {
    return std::ranges::find(of_edges, true) != of_edges.end();
  };
  if (!has_graph && !any(in_flight.owes_gradients) && !any(in_flight.expects_gradients)) {
    end_flight(run.id, microbatch);
    return;
  }
  most_in_flight_ = std::max(most_in_flight_.load(), static_cast<int>(in_flight_.size()));
}

std::optional<ForwardResult> StageWorker::compute(const Run& run, int microbatch, ForwardCall call,
                                                  InFlight& in_flight) {
  const std::int64_t version = version_of(run, microbatch);
  if (version > stage_->versions().newest()) {
    updates_.finish();
    if (is_discarded(run)) {  // the version was not made
      return std::nullopt;
    }
  }
  updates_.await(version);
  const ExecutedAction action = begin(ActionKind::kForward, run.id, microbatch, version);
  const ActionRange range(action);
  stage_->versions().pin(version);
  in_flight.version = version;
  call.slot = stage_->versions().slot(version);
  in_flight.loss_scale =
      updates_.scale_losses(run.id, run.begins_batch, version_of_batch(run.batch));
  call.loss_scale = in_flight.loss_scale;
  in_flight.random_key = random_key(run, microbatch);
  std::int64_t bytes = 0;
  if (mine_.recompute) {
    in_flight.call = call;
    in_flight.call.again = true;
    for (Message& message : in_flight.call.inbound) {
      bytes += message.bytes();
      for (at::Tensor& tensor : message.tensors) {
        tensor = tensor.tensor_data();  // without the history that the first forward gives it
      }
    }
  }
  ForwardResult result;
  if (!attempt(run, [&] { result = run_forward(run, std::move(call), in_flight); })) {
    release(in_flight);
    return std::nullopt;
  }
  if (result.loss.defined()) {
    add_loss(run, microbatch, result, in_flight);
  }
  if (mine_.recompute) {
    in_flight.history.clear();
  }
  if (std::ranges::find(in_flight.owes_gradients, true) != in_flight.owes_gradients.end() ||
      is_differentiable(result)) {
    count_bytes(in_flight, bytes + result.bytes_kept);
  }
  callbacks_.log.end(action);
  return result;
}

void StageWorker::release(InFlight& in_flight) {
  if (in_flight.version >= 0) {
    stage_->versions().unpin(std::exchange(in_flight.version, -1));
  }
  bytes_in_flight_ -= std::exchange(in_flight.bytes, 0);
  in_flight.call = {};
  in_flight.history.clear();
  in_flight.graph = {};
  in_flight.split.reset();
  in_flight.held.clear();
}

bool StageWorker::is_differentiable(const ForwardResult& result) {
  const auto needs = [](const at::Tensor& tensor) { return tensor.requires_grad(); };
  return (result.loss.defined() && needs(result.loss)) ||
         std::ranges::any_of(result.outbound, [&](const Message& message) {
           return std::ranges::any_of(message.tensors, needs);
         });
}

std::optional<std::uint64_t> StageWorker::random_key(const Run& run, int microbatch) const {
  if (!run.seed) {
    return std::nullopt;
  }
  // As one replica with the microbatches of all would count them.
  const std::uint64_t before = run.first_microbatch + first_microbatch_;
  return mix_seed(mix_seed(*run.seed, run.id), before + microbatch);
}

KeyedRandom StageWorker::draw_by(std::optional<std::uint64_t> key, ActionKind kind) const {
  // A forward's code numbers the draws of its layers; what it does not know of has numbers of the
  // stage's own.
  const auto number = ~(static_cast<std::uint64_t>(kind) << 32 | mine_.index);
  return KeyedRandom(key ? std::optional(RandomPlace{*key, number, 0, 0}) : std::nullopt,
                     {.repeats = mine_.recompute, .is_of_backward = kind != ActionKind::kForward});
}

ForwardResult StageWorker::call_forward(ForwardCall call, std::optional<std::uint64_t> key) const {
  const KeyedRandom random = draw_by(key, ActionKind::kForward);
  return mine_.forward(std::move(call));
}

ForwardResult StageWorker::run_forward(const Run& run, ForwardCall call, InFlight& in_flight) {
  const auto forward = [&](ForwardCall given) {
    return call_forward(std::move(given), in_flight.random_key);
  };
  if (graphs_) {
    in_flight.graph.wiring = run.wiring;
    in_flight.graph.layout = in_flight.layout;
    in_flight.graph.random_key = in_flight.random_key;
    return graphs_->forward(std::move(call), forward, in_flight.graph, in_flight.history);
  }
  in_flight.history.add_sinks(call.inbound);
  ForwardResult result = forward(std::move(call));
  in_flight.history.keep_edges(result);
  return result;
}

void StageWorker::count_bytes(InFlight& in_flight, std::int64_t bytes) {
  in_flight.bytes += bytes;
  bytes_in_flight_ += bytes;
  most_bytes_in_flight_ = std::max(most_bytes_in_flight_.load(), bytes_in_flight_);
}

void StageWorker::evaluate(const Run& run, int microbatch) {
  const at::NoGradGuard no_grad;
  InFlight none;
  ForwardCall call = receive_values(run, microbatch, none);
  updates_.await(stage_->versions().newest());
  const std::int64_t newest = stage_->versions().newest();
  const ActionRange range({mine_.index, ActionKind::kForward, run.id, microbatch, newest, 0, 0},
                          /*evaluates=*/true);
  call.slot = stage_->versions().slot(newest);
  std::optional<ForwardResult> result;
  if (!is_discarded(run) && !attempt(run, [&] { result = mine_.forward(std::move(call)); })) {
    result.reset();
  }
  send_values(run, microbatch, result, nullptr);
  backlog_.add(streams().compute, none.message_bytes);
}

ExecutedAction StageWorker::begin(ActionKind kind, std::int64_t run, int microbatch,
                                  std::int64_t version) const {
  ExecutedAction action{mine_.index, kind, run, first_microbatch_ + microbatch, version, 0, 0};
  callbacks_.log.begin(action, stage_->streams().device);
  return action;
}

// ---------------------------------------------------------------- backwards

void StageWorker::recompute(std::int64_t run, int microbatch, InFlight& in_flight) {
  const ExecutedAction action = begin(ActionKind::kRecompute, run, microbatch, in_flight.version);
  const ActionRange range(action);
  ForwardCall call = std::exchange(in_flight.call, {});
  in_flight.history.add_sinks(call.inbound);
  const ForwardResult result = call_forward(std::move(call), in_flight.random_key);
  in_flight.history.keep_edges(result);
  count_bytes(in_flight, result.bytes_kept);
  callbacks_.log.end(action);
}

StageWorker::InFlight& StageWorker::in_flight(std::int64_t run, int microbatch) {
  const auto place = in_flight_.find({run, microbatch});
  PD2_ASSERT(place != in_flight_.end(), "backward of a microbatch that is not in flight");
  return place->second;
}

bool StageWorker::skips_backward(ActionKind kind, const Run& run, int microbatch) {
  if (in_flight_.contains({run.id, microbatch})) {
    return false;
  }
  if (!is_discarded(run) && !is_absent(run, microbatch)) {
    callbacks_.log.end(begin(kind, run.id, microbatch, version_of(run, microbatch)));
  }
  return true;
}

void StageWorker::begin_gradients(const Run& run, int microbatch) {
  if (microbatch == 0 && run.begins_batch) {
    updates_.free_gradients();
    updates_.await(stage_->version_before_gradients(run.batch));
    stage_->begin_batch(run.batch);
  }
  stage_->begin_microbatch(run.batch, lets_sums_begin(run, microbatch));
}

// A device's sums over the copies of two pipelines begin in the update: see receives.h.
bool StageWorker::lets_sums_begin(const Run& run, int microbatch) const {
  return run.ends_batch && microbatch == last_microbatch() &&
         (setup_.schedule.num_pipelines == 1 || stage_->on_host());
}

void StageWorker::end_flight(std::int64_t run, int microbatch) {
  const auto place = in_flight_.find({run, microbatch});
  release(place->second);
  backlog_.add(streams().compute, place->second.message_bytes);
  in_flight_.erase(place);
}

void StageWorker::backward(const Run& run, int microbatch) {
  if (!is_discarded(run)) {
    begin_gradients(run, microbatch);
  }
  if (skips_backward(ActionKind::kBackward, run, microbatch)) {
    return;
  }
  const bool begins_early = stage_->gradients().begins_early() && lets_sums_begin(run, microbatch);
  InFlight& in_flight = this->in_flight(run.id, microbatch);
  run_backward(ActionKind::kBackward, run, microbatch, [&](const Incoming& incoming) {
    if (graphs_) {
      graphs_->backward(in_flight.graph, incoming, begins_early);
    } else {
      run_autograd(incoming, /*keep_graph=*/false);
    }
  });
  end_flight(run.id, microbatch);
}

void StageWorker::input_grad(const Run& run, int microbatch) {
  if (skips_backward(ActionKind::kInputGrad, run, microbatch)) {
    return;
  }
  InFlight& in_flight = this->in_flight(run.id, microbatch);
  in_flight.split = std::make_unique<SplitBackward>();
  stage_->gradients().hold(&in_flight.held);
  run_backward(ActionKind::kInputGrad, run, microbatch,
               [&](const Incoming& incoming) { in_flight.split->run_input_half(incoming); });
  stage_->gradients().hold(nullptr);
  in_flight.history.clear();
}

void StageWorker::weight_grad(const Run& run, int microbatch) {
  if (!is_discarded(run)) {
    begin_gradients(run, microbatch);
  }
  if (skips_backward(ActionKind::kWeightGrad, run, microbatch)) {
    return;
  }
  InFlight& in_flight = this->in_flight(run.id, microbatch);
  if (!is_discarded(run) && in_flight.split) {
    const ExecutedAction action =
        begin(ActionKind::kWeightGrad, run.id, microbatch, in_flight.version);
    const ActionRange range(action);
    const auto run_half = [&] {
      {
        const KeyedRandom random = draw_by(in_flight.random_key, action.kind);
        in_flight.split->run_weight_half();
      }
      for (const HeldGradient& held : in_flight.held) {
        held.accumulator->add(held.parameter, held.gradient);
      }
    };
    const auto has_sent = [&] {
      return std::ranges::find(in_flight.owes_gradients, true) != in_flight.owes_gradients.end();
    };
    if (attempt(run, run_half, has_sent)) {
      callbacks_.log.end(action);
    }
  }
  end_flight(run.id, microbatch);
}

Incoming StageWorker::receive_gradients(const Run& run, InFlight& in_flight) const {
  const Wiring& wiring = wirings_.at(in_flight.wiring);
  Incoming incoming;
  // The last consumer's gradient first: the order in which the unsplit backward adds them.
  for (std::size_t e = wiring.outbound.size(); e-- > 0;) {
    if (!in_flight.expects_gradients[e]) {
      continue;
    }
    Message message = wiring.outbound[e].receiver->receive();
    look_at(message, run);
    in_flight.message_bytes += message.bytes();
    if (is_discarded(run)) {
      continue;
    }
    for (std::size_t i = 0; i < message.tensors.size(); ++i) {
      if (in_flight.history.outputs[e][i].is_valid() && message.tensors[i].defined()) {
        incoming.roots.push_back(in_flight.history.outputs[e][i]);
        incoming.gradients.push_back(std::move(message.tensors[i]));
      }
    }
  }
  if (in_flight.history.loss.is_valid()) {
    incoming.roots.push_back(in_flight.history.loss);
    incoming.gradients.push_back(in_flight.loss_seed);
  }
  return incoming;
}

void StageWorker::run_backward(ActionKind kind, const Run& run, int microbatch,
                               const std::function<void(const Incoming&)>& execute) {
  InFlight& in_flight = this->in_flight(run.id, microbatch);
  if (mine_.recompute && !is_discarded(run)) {  // before waiting for the gradients
    attempt(run, [&] { recompute(run.id, microbatch, in_flight); });
  }
  const Wiring& wiring = wirings_.at(in_flight.wiring);
  const Incoming incoming = receive_gradients(run, in_flight);
  const ExecutedAction action = begin(kind, run.id, microbatch, in_flight.version);
  const ActionRange range(action);
  std::optional<double> sent_at;
  std::vector<bool> sent(wiring.inbound.size());
  const auto captured = [&](std::size_t e) {
    auto& sink = static_cast<InputSink&>(*in_flight.history.sinks[e]);
    Message message;
    message.tensors = std::move(sink.captured);
    message.tensors.resize(sink.num_inputs());
    message.requires_grad.assign(message.tensors.size(), false);
    return message;
  };
  bool is_good = !is_discarded(run);
  if (is_good) {
    // The producers need not wait until the last weights' gradients are added. (For a device's
    // tensors, autograd runs the node in a thread of its own.)
    for (std::size_t e = 0; e < wiring.inbound.size() && stage_->on_host(); ++e) {
      if (in_flight.history.sinks[e]) {
        static_cast<InputSink&>(*in_flight.history.sinks[e]).on_captured = [&, e] {
          sent_at = now();
          wiring.inbound[e].sender->send(in_flight.layout, captured(e));
          sent[e] = true;
        };
      }
    }
    const auto compute = [&] {
      const KeyedRandom random = draw_by(in_flight.random_key, kind);
      execute(incoming);
    };
    is_good = attempt(run, compute, [&] { return sent_at.has_value(); });
  }
  if (is_good) {
    callbacks_.log.end(action, sent_at);
  }
  std::vector<Message> messages(wiring.inbound.size());
  for (std::size_t e = 0; e < messages.size(); ++e) {
    if (in_flight.owes_gradients[e] && !sent[e]) {
      if (is_good) {
        messages[e] = captured(e);
      } else {
        messages[e].is_void = true;
      }
      wiring.inbound[e].sender->prepare(in_flight.layout, messages[e]);
    }
  }
  callbacks_.receives.post_with_sends();
  for (std::size_t e = 0; e < messages.size(); ++e) {
    if (in_flight.owes_gradients[e] && !sent[e]) {
      wiring.inbound[e].sender->send(in_flight.layout, std::move(messages[e]));
    }
  }
  if (!is_good) {
    release(in_flight);
  }
}

}  // namespace pd2
