#include "engine/run/stage_worker.h"

#include "core/check.h"
#include "engine/clock.h"
#include "engine/run/input_sink.h"
#include "engine/run/keyed_random.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full_like.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <chrono>

namespace pd2 {

namespace {

// While it lives, profilers that record this thread show a range: "pd2 stage 1 forward batch 3
// microbatch 2 version 2". If none records, it costs one look at the thread's callbacks.
class ActionRange {
 public:
  explicit ActionRange(const ExecutedAction& action) {
    if (range_.isActive()) {
      const std::string microbatch = action.kind == ActionKind::kUpdate
                                         ? std::string()
                                         : detail::concat(" microbatch ", action.microbatch);
      range_.before(detail::concat("pd2 stage ", action.stage, " ", name_of(action.kind), " batch ",
                                   action.run, microbatch, " version ", action.version));
    }
  }
  // The range of an evaluation.
  ActionRange(int stage, int microbatch, std::int64_t version) {
    if (range_.isActive()) {
      range_.before(detail::concat("pd2 stage ", stage, " evaluation microbatch ", microbatch,
                                   " version ", version));
    }
  }

 private:
  at::RecordFunction range_{at::RecordScope::USER_SCOPE};
};

}  // namespace

StageWorker::StageWorker(const ExecutorSetup& setup, const StageSetup& mine,
                         std::function<void(const ExecutedAction&)> log, UpdateCallbacks updates)
    : setup_(setup),
      mine_(mine),
      first_microbatch_(setup.schedule.number_in_batch(mine.index, 0)),
      log_(std::move(log)),
      updates_(*stage_, with_record(std::move(updates))) {}

UpdateCallbacks StageWorker::with_record(UpdateCallbacks callbacks) {
  callbacks.record = [this](std::int64_t run, std::int64_t version,
                            const std::function<void()>& update) {
    const ExecutedAction action = begin(ActionKind::kUpdate, run, last_microbatch(), version);
    {
      const ActionRange range(action);
      update();
    }
    log(action, now());
  };
  return callbacks;
}

std::int64_t StageWorker::version_of_batch(std::int64_t batch) const {
  return std::max(stage_->versions().version_of_batch(batch, setup_.schedule.delay.at(mine_.index)),
                  std::min(batch, setup_.warmup_batches - 1));
}

void StageWorker::expect_values(const Run& run, int num_microbatches) {
  for (const InboundEdge& edge : wirings_.at(run.wiring).inbound) {
    for (int microbatch = 0; microbatch < num_microbatches; ++microbatch) {
      edge.values->expect(layout(run, microbatch));
    }
  }
}

void StageWorker::drop_connections() {
  wirings_.clear();
  stage_->drop_connections();
  updates_.drop_connections();
}

void StageWorker::clear() {
  updates_.end();
  in_flight_.clear();
  loss_ = {};
}

ForwardCall StageWorker::receive_values(const Run& run, int microbatch) {
  ForwardCall call;
  call.run = run.id;
  call.microbatch = microbatch;
  for (const InboundEdge& edge : wirings_.at(run.wiring).inbound) {
    call.inbound.push_back(edge.values->receive());
  }
  return call;
}

void StageWorker::add_sinks(ForwardCall& call, InFlight& in_flight) {
  in_flight.sinks.clear();
  for (Message& message : call.inbound) {
    NodePtr sink;
    if (message.differentiable()) {
      sink = make_input_sink<NodePtr>();
      for (std::size_t i = 0; i < message.tensors.size(); ++i) {
        if (message.requires_grad[i]) {
          torch::autograd::create_gradient_edge(message.tensors[i], sink);
        } else {
          // Every tensor of the message has a place in the sink, so that indices agree.
          sink->add_input_metadata(torch::autograd::Node::undefined_input());
        }
      }
    }
    in_flight.sinks.push_back(std::move(sink));
  }
}

void StageWorker::keep_edges(const ForwardResult& result, InFlight& in_flight) {
  const auto edge_of = [](const at::Tensor& tensor) {
    return tensor.defined() && tensor.requires_grad() ? torch::autograd::impl::gradient_edge(tensor)
                                                      : torch::autograd::Edge();
  };
  in_flight.outputs.clear();
  for (const Message& message : result.outbound) {
    std::vector<torch::autograd::Edge>& edges = in_flight.outputs.emplace_back();
    for (const at::Tensor& tensor : message.tensors) {
      edges.push_back(edge_of(tensor));
    }
  }
  in_flight.loss = edge_of(result.loss);
}

void StageWorker::send_values(const Run& run, int microbatch, ForwardResult& result,
                              InFlight* in_flight) {
  const Wiring& wiring = wirings_.at(run.wiring);
  PD2_ASSERT(result.outbound.size() == wiring.outbound.size(), "a message for each edge");
  const LayoutId layout = this->layout(run, microbatch);
  for (std::size_t e = 0; e < wiring.outbound.size(); ++e) {
    Message& message = result.outbound[e];
    message.requires_grad.clear();
    for (at::Tensor& tensor : message.tensors) {
      message.requires_grad.push_back(in_flight && tensor.requires_grad());
      tensor = tensor.tensor_data();
    }
    const bool expects_gradients = message.differentiable();
    wiring.outbound[e].values->send(layout, std::move(message));
    if (in_flight) {
      in_flight->expects_gradients.push_back(expects_gradients);
    }
    if (expects_gradients) {
      wiring.outbound[e].gradients->expect(layout);
    }
  }
}

void StageWorker::add_loss(const Run& run, int microbatch, const ForwardResult& result,
                           InFlight& in_flight) {
  const at::Tensor& loss = result.loss;
  if (microbatch == 0) {
    loss_.rows = run.rows;
    loss_.first = first_microbatch_;
  }
  if (loss.requires_grad()) {
    // The mean over replicas: each adds its gradients with weight 1/w.
    at::Tensor seed = at::full_like(loss, 1.0 / setup_.num_replicas);
    if (run.num_averaged > 1) {
      seed = seed / static_cast<std::int64_t>(run.num_averaged);
    }
    in_flight.loss_seed = loss_.weighted(seed, microbatch);
    if (in_flight.loss_scale != 1) {
      in_flight.loss_seed = in_flight.loss_seed * in_flight.loss_scale;
    }
  }
  loss_.losses.push_back(loss.tensor_data());
  if (result.metrics.defined()) {
    loss_.metrics = loss_.metrics.defined() ? loss_.metrics + result.metrics : result.metrics;
  }
  if (microbatch == last_microbatch()) {
    setup_.on_loss(run.id, std::exchange(loss_, {}), setup_.schedule.pipeline(mine_.index));
  }
}

void StageWorker::forward(const Run& run, int microbatch) {
  InFlight in_flight;
  in_flight.layout = layout(run, microbatch);
  in_flight.wiring = run.wiring;
  in_flight.version = version_of_batch(run.batch);
  ForwardCall call = receive_values(run, microbatch);
  if (in_flight.version > stage_->versions().newest()) {
    updates_.finish();
  }
  const ExecutedAction action = begin(ActionKind::kForward, run.id, microbatch, in_flight.version);
  const ActionRange range(action);
  stage_->versions().pin(in_flight.version);
  call.slot = stage_->versions().slot(in_flight.version);
  in_flight.loss_scale = updates_.scale_losses(run.id, run.begins_batch, in_flight.version);
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
  add_sinks(call, in_flight);
  const bool owes_gradients =
      std::ranges::any_of(in_flight.sinks, [](const NodePtr& sink) { return sink != nullptr; });
  ForwardResult result = call_forward(std::move(call), in_flight.random_key);
  if (result.loss.defined()) {
    add_loss(run, microbatch, result, in_flight);
  }
  if (mine_.recompute) {
    in_flight.sinks.clear();
  } else {
    keep_edges(result, in_flight);
  }
  const bool has_backward = owes_gradients || is_differentiable(result);
  log(action, now());
  send_values(run, microbatch, result, &in_flight);
  if (!has_backward) {
    stage_->versions().unpin(in_flight.version);
    return;
  }
  count_bytes(in_flight, bytes + result.bytes_kept);
  in_flight_.emplace(std::pair(run.id, microbatch), std::move(in_flight));
  most_in_flight_ = std::max(most_in_flight_.load(), static_cast<int>(in_flight_.size()));
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
  const std::uint64_t before = setup_.replica * run.layouts.size() + first_microbatch_;
  return mix_seed(mix_seed(*run.seed, run.id), before + microbatch);
}

KeyedRandom StageWorker::draw_by(std::optional<std::uint64_t> key, ActionKind kind) const {
  // A forward's code numbers the draws of its layers; what it does not know of has numbers of the
  // stage's own.
  const auto number = ~(static_cast<std::uint64_t>(kind) << 32 | mine_.index);
  return KeyedRandom(key ? std::optional(RandomPlace{*key, number, 0, 0}) : std::nullopt,
                     {.repeats = mine_.recompute});
}

ForwardResult StageWorker::call_forward(ForwardCall call, std::optional<std::uint64_t> key) const {
  const KeyedRandom random = draw_by(key, ActionKind::kForward);
  return mine_.forward(std::move(call));
}

void StageWorker::count_bytes(InFlight& in_flight, std::int64_t bytes) {
  in_flight.bytes += bytes;
  bytes_in_flight_ += bytes;
  most_bytes_in_flight_ = std::max(most_bytes_in_flight_.load(), bytes_in_flight_);
}

void StageWorker::recompute(std::int64_t run, int microbatch, InFlight& in_flight) {
  const ExecutedAction action = begin(ActionKind::kRecompute, run, microbatch, in_flight.version);
  const ActionRange range(action);
  ForwardCall call = std::exchange(in_flight.call, {});
  add_sinks(call, in_flight);
  const ForwardResult result = call_forward(std::move(call), in_flight.random_key);
  keep_edges(result, in_flight);
  count_bytes(in_flight, result.bytes_kept);
  log(action, now());
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
  log(begin(kind, run.id, microbatch, version_of_batch(run.batch)), now());
  return true;
}

void StageWorker::begin_gradients(const Run& run, int microbatch) {
  if (microbatch == 0 && run.begins_batch) {
    if (!stage_->overlaps()) {  // the one buffer is in use
      updates_.finish();
    }
    stage_->begin_batch(run.batch);
  }
  const bool is_last = run.ends_batch && microbatch == last_microbatch();
  stage_->begin_microbatch(run.batch, is_last);
}

void StageWorker::end_flight(std::int64_t run, int microbatch) {
  const auto place = in_flight_.find({run, microbatch});
  stage_->versions().unpin(place->second.version);
  bytes_in_flight_ -= place->second.bytes;
  in_flight_.erase(place);
}

void StageWorker::backward(const Run& run, int microbatch) {
  begin_gradients(run, microbatch);
  if (skips_backward(ActionKind::kBackward, run, microbatch)) {
    return;
  }
  run_backward(ActionKind::kBackward, run.id, microbatch,
               [](const auto& roots, const auto& gradients) {
                 run_autograd(roots, gradients, /*keep_graph=*/false);
               });
  end_flight(run.id, microbatch);
}

void StageWorker::input_grad(const Run& run, int microbatch) {
  if (skips_backward(ActionKind::kInputGrad, run, microbatch)) {
    return;
  }
  InFlight& in_flight = this->in_flight(run.id, microbatch);
  in_flight.split = std::make_unique<SplitBackward>();
  stage_->hold_gradients(&in_flight.held);
  run_backward(ActionKind::kInputGrad, run.id, microbatch,
               [&](const auto& roots, const auto& gradients) {
                 in_flight.split->run_input_half(roots, gradients);
               });
  stage_->hold_gradients(nullptr);
  in_flight.sinks.clear();
  in_flight.outputs.clear();
  in_flight.loss = {};
}

void StageWorker::weight_grad(const Run& run, int microbatch) {
  begin_gradients(run, microbatch);
  if (skips_backward(ActionKind::kWeightGrad, run, microbatch)) {
    return;
  }
  InFlight& in_flight = this->in_flight(run.id, microbatch);
  const ExecutedAction action =
      begin(ActionKind::kWeightGrad, run.id, microbatch, in_flight.version);
  const ActionRange range(action);
  {
    const KeyedRandom random = draw_by(in_flight.random_key, action.kind);
    in_flight.split->run_weight_half();
  }
  for (const HeldGradient& held : in_flight.held) {
    held.accumulator->add(held.parameter, held.gradient);
  }
  log(action, now());
  end_flight(run.id, microbatch);
}

void StageWorker::run_backward(ActionKind kind, std::int64_t run, int microbatch,
                               const Backward& execute) {
  InFlight& in_flight = this->in_flight(run, microbatch);
  if (mine_.recompute) {
    recompute(run, microbatch, in_flight);  // before waiting for the gradients
  }
  const Wiring& wiring = wirings_.at(in_flight.wiring);
  torch::autograd::edge_list roots;
  torch::autograd::variable_list gradients;
  // The last consumer's gradient first: the order in which the unsplit backward adds them.
  for (std::size_t e = wiring.outbound.size(); e-- > 0;) {
    if (!in_flight.expects_gradients[e]) {
      continue;
    }
    Message message = wiring.outbound[e].gradients->receive();
    for (std::size_t i = 0; i < message.tensors.size(); ++i) {
      if (in_flight.outputs[e][i].is_valid() && message.tensors[i].defined()) {
        roots.push_back(in_flight.outputs[e][i]);
        gradients.push_back(std::move(message.tensors[i]));
      }
    }
  }
  const ExecutedAction action = begin(kind, run, microbatch, in_flight.version);
  const ActionRange range(action);
  if (in_flight.loss.is_valid()) {
    roots.push_back(in_flight.loss);
    gradients.push_back(in_flight.loss_seed);
  }
  std::optional<double> sent_at;
  std::vector<bool> sent(wiring.inbound.size());
  const auto send = [&](std::size_t e) {
    auto& sink = static_cast<InputSink&>(*in_flight.sinks[e]);
    Message message;
    message.tensors = std::move(sink.captured);
    message.tensors.resize(sink.num_inputs());
    message.requires_grad.assign(message.tensors.size(), false);
    sent_at = now();
    sent[e] = true;
    wiring.inbound[e].gradients->send(in_flight.layout, std::move(message));
  };
  // The producers need not wait until the last weights' gradients are added. (For CUDA tensors,
  // autograd runs the node in a thread of its own.)
  for (std::size_t e = 0; e < wiring.inbound.size() && !stage_->on_cuda(); ++e) {
    if (in_flight.sinks[e]) {
      static_cast<InputSink&>(*in_flight.sinks[e]).on_captured = [&send, e] { send(e); };
    }
  }
  {
    const KeyedRandom random = draw_by(in_flight.random_key, kind);
    execute(roots, gradients);
  }
  log(action, sent_at.value_or(now()));
  for (std::size_t e = 0; e < wiring.inbound.size(); ++e) {
    if (in_flight.sinks[e] && !sent[e]) {
      send(e);
    }
  }
}

void StageWorker::evaluate(const Run& run, int microbatch) {
  const at::NoGradGuard no_grad;
  ForwardCall call = receive_values(run, microbatch);
  const ActionRange range(mine_.index, microbatch, stage_->versions().newest());
  call.slot = stage_->versions().slot(stage_->versions().newest());
  ForwardResult result = mine_.forward(std::move(call));
  send_values(run, microbatch, result, nullptr);
}

ExecutedAction StageWorker::begin(ActionKind kind, std::int64_t run, int microbatch,
                                  std::int64_t version) const {
  return {mine_.index, kind, run, first_microbatch_ + microbatch, version, now(), 0};
}

void StageWorker::log(ExecutedAction action, double end) const {
  action.end = end;
  log_(action);
}

}  // namespace pd2
