// The backward actions of a stage.
#include "core/check.h"
#include "engine/clock.h"
#include "engine/run/action_range.h"
#include "engine/run/input_sink.h"
#include "engine/run/stage_worker.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

namespace pd2 {

void StageWorker::recompute(std::int64_t run, int microbatch, InFlight& in_flight) {
  const ExecutedAction action = begin(ActionKind::kRecompute, run, microbatch, in_flight.version);
  const ActionRange range(action);
  ForwardCall call = std::exchange(in_flight.call, {});
  in_flight.history.add_sinks(call.inbound);
  const ForwardResult result = call_forward(std::move(call), in_flight.random_key);
  in_flight.history.keep_edges(result);
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
  if (!is_discarded(run) && !is_absent(run, microbatch)) {
    log(begin(kind, run.id, microbatch, version_of_batch(run.batch)), now());
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
  leave_to_device(place->second);
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
  run_backward(ActionKind::kBackward, run, microbatch,
               [&](const auto& roots, const auto& gradients) {
                 if (graphs_) {
                   graphs_->backward(in_flight.graph, {roots, gradients}, begins_early);
                 } else {
                   run_autograd(roots, gradients, /*keep_graph=*/false);
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
               [&](const auto& roots, const auto& gradients) {
                 in_flight.split->run_input_half(roots, gradients);
               });
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
      log(action, now());
    }
  }
  end_flight(run.id, microbatch);
}

StageWorker::Incoming StageWorker::receive_gradients(const Run& run, InFlight& in_flight) const {
  const Wiring& wiring = wirings_.at(in_flight.wiring);
  Incoming incoming;
  // The last consumer's gradient first: the order in which the unsplit backward adds them.
  for (std::size_t e = wiring.outbound.size(); e-- > 0;) {
    if (!in_flight.expects_gradients[e]) {
      continue;
    }
    Message message = wiring.outbound[e].gradients->receive();
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
                               const Backward& execute) {
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
          wiring.inbound[e].gradients->send(in_flight.layout, captured(e));
          sent[e] = true;
        };
      }
    }
    const auto compute = [&] {
      const KeyedRandom random = draw_by(in_flight.random_key, kind);
      execute(incoming.roots, incoming.gradients);
    };
    is_good = attempt(run, compute, [&] { return sent_at.has_value(); });
  }
  if (is_good) {
    log(action, sent_at.value_or(now()));
  }
  std::vector<Message> messages(wiring.inbound.size());
  for (std::size_t e = 0; e < messages.size(); ++e) {
    if (in_flight.owes_gradients[e] && !sent[e]) {
      if (is_good) {
        messages[e] = captured(e);
      } else {
        messages[e].is_void = true;
      }
      wiring.inbound[e].gradients->prepare(in_flight.layout, messages[e]);
    }
  }
  callbacks_.post_with_sends();
  for (std::size_t e = 0; e < messages.size(); ++e) {
    if (in_flight.owes_gradients[e] && !sent[e]) {
      wiring.inbound[e].gradients->send(in_flight.layout, std::move(messages[e]));
    }
  }
  if (!is_good) {
    release(in_flight);
  }
}

}  // namespace pd2
