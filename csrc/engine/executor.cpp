#include "engine/executor.h"

#include "core/check.h"
#include "engine/input_sink.h"
#include "engine/this_thread.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full_like.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <chrono>
#include <set>

namespace pd2 {
namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

Executor::Executor(ExecutorOptions options, std::shared_ptr<Stage> stage,
                   std::shared_ptr<Fault> fault)
    : options_(std::move(options)), stage_(std::move(stage)), fault_(std::move(fault)) {
  for (const auto* list :
       {&options_.actions.prologue, &options_.actions.steady, &options_.actions.epilogue}) {
    for (const Action& action : *list) {
      PD2_CHECK(action.stage == options_.stage, "an executor runs one stage: ", options_.stage,
                ", got ", to_string(action));
    }
  }
  fault_->on_raise(this, [this] {
    abort_channels();
    const std::lock_guard lock(mutex_);
    submitted_.notify_all();
    executed_.notify_all();
  });
  thread_ = std::thread([this] {
    if (options_.run_thread) {
      options_.run_thread([this] { loop(); });
    } else {
      loop();
    }
  });
  // The loop begins by setting its thread's intra-op threads, which also sets the process's
  // default: the caller may set that back once the constructor has returned.
  std::unique_lock lock(mutex_);
  executed_.wait(lock, [this] { return looping_; });
}

Executor::~Executor() {
  fault_->forget(this);
  close();
}

void Executor::set_wiring(int id, Wiring wiring) {
  const std::lock_guard lock(mutex_);
  wirings_[id] = std::move(wiring);
}

Executor::Ticket Executor::submit(std::function<void()> command) {
  fault_->rethrow_if_raised();
  Ticket ticket;
  {
    const std::lock_guard lock(mutex_);
    commands_.push_back(std::move(command));
    ticket = ++last_ticket_;
  }
  submitted_.notify_one();
  return ticket;
}

void Executor::expect_values(const Run& run) {
  for (const InboundEdge& edge : wirings_.at(run.wiring).inbound) {
    for (LayoutId layout : run.layouts) {
      edge.values->expect(layout);
    }
  }
}

Executor::Ticket Executor::submit_batch(Run run) {
  const auto m = static_cast<std::size_t>(options_.num_microbatches);
  PD2_ASSERT(run.layouts.size() == m, run.layouts.size(), " microbatches");
  PD2_ASSERT(run.rows.empty() || run.rows.size() == m, run.rows.size(), " numbers of rows");
  expect_values(run);
  return submit([this, run = std::move(run)] {
    const bool continues = running_ && last_run_.wiring == run.wiring;
    first_batch_ = continues ? first_batch_ : run.id;
    PD2_ASSERT(continues || in_flight_.empty(), "the wiring changed with microbatches in flight");
    last_run_ = run;
    running_ = true;
    run_actions(continues ? options_.actions.steady : options_.actions.prologue, run);
  });
}

Executor::Ticket Executor::submit_update(std::int64_t batch, std::function<void(Stage&)> apply) {
  return submit([this, batch, apply = std::move(apply)] {
    if (gradients_ready_ == batch) {
      gradients_ready_.reset();
      this->apply(batch, apply);
    } else {
      updates_.emplace(batch, apply);
    }
  });
}

Executor::Ticket Executor::submit_drain() {
  return submit([this] { drain(); });
}

Executor::Ticket Executor::submit_evaluation(Run run) {
  expect_values(run);
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
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  submitted_.notify_all();
  abort_channels();
  if (thread_.joinable()) {
    thread_.join();
  }
}

void Executor::abort_channels() {
  for (auto& [id, wiring] : wirings_) {
    for (InboundEdge& edge : wiring.inbound) {
      edge.values->abort();
      edge.gradients->abort();
    }
    for (OutboundEdge& edge : wiring.outbound) {
      edge.values->abort();
      edge.gradients->abort();
    }
  }
}

void Executor::loop() {
  name_this_thread("pd2 stage " + std::to_string(options_.stage));
  if (options_.num_threads > 0) {
    at::get_num_threads();  // the first call in a thread takes the process's default, so make it
                            // now
    at::set_num_threads(options_.num_threads);
  }
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
    // Somebody else's failure, or close().
  } catch (...) {
    fault_->raise(where() + ": " + options_.describe(std::current_exception()));
  }
  in_flight_.clear();
  updates_.clear();
  loss_ = {};
}

std::string Executor::where() const {
  const char* action = doing_.kind == ActionKind::kForward    ? "forward"
                       : doing_.kind == ActionKind::kBackward ? "backward"
                                                              : "update";
  return pd2::detail::concat(stage_name(options_.stage, options_.replica, options_.num_replicas),
                             doing_.evaluating ? ", evaluation" : ", batch ",
                             doing_.evaluating ? "" : std::to_string(doing_.batch), ", microbatch ",
                             doing_.microbatch, ", ", action);
}

void Executor::run_actions(const std::vector<Action>& actions, const Run& run) {
  const int m = options_.num_microbatches;
  for (const Action& action : actions) {
    // Microbatch numbers count from this batch's first; negative ones are the previous batches'.
    const int before = action.microbatch < 0 ? (m - 1 - action.microbatch) / m : 0;
    const std::int64_t batch = run.id - before;
    if (batch < first_batch_) {
      continue;
    }
    const int microbatch = action.microbatch + before * m;
    doing_ = {action.kind, batch, microbatch, false};
    switch (action.kind) {
      case ActionKind::kForward:
        forward(run, microbatch);
        break;
      case ActionKind::kBackward:
        backward(batch, microbatch);
        break;
      case ActionKind::kUpdate:
        update(batch);
        break;
      default:
        PD2_CHECK(false, "action ", to_string(action),
                  ": this executor runs F, B and U, not split backwards");
    }
  }
}

ForwardCall Executor::receive_values(const Run& run, int microbatch, InFlight* in_flight) {
  ForwardCall call{run.id, microbatch, 0, {}};
  for (const InboundEdge& edge : wirings_.at(run.wiring).inbound) {
    Message message = edge.values->receive();
    NodePtr sink;
    if (in_flight && message.differentiable()) {
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
    if (in_flight) {
      in_flight->sinks.push_back(std::move(sink));
    }
    call.inbound.push_back(std::move(message));
  }
  return call;
}

void Executor::send_values(const Run& run, int microbatch, ForwardResult& result,
                           InFlight* in_flight) {
  const Wiring& wiring = wirings_.at(run.wiring);
  PD2_ASSERT(result.outbound.size() == wiring.outbound.size(), "a message for each edge");
  const LayoutId layout = run.layouts[microbatch];
  for (std::size_t e = 0; e < wiring.outbound.size(); ++e) {
    Message& message = result.outbound[e];
    message.requires_grad.clear();
    std::vector<torch::autograd::Edge> outputs;
    for (at::Tensor& tensor : message.tensors) {
      const bool requires_grad = in_flight && tensor.requires_grad();
      message.requires_grad.push_back(requires_grad);
      outputs.push_back(requires_grad ? torch::autograd::impl::gradient_edge(tensor)
                                      : torch::autograd::Edge());
      tensor = tensor.tensor_data();
    }
    if (in_flight) {
      const bool differentiable = message.differentiable();
      in_flight->outputs.push_back(std::move(outputs));
      in_flight->expects_gradients.push_back(differentiable);
    }
    wiring.outbound[e].values->send(layout, std::move(message));
    if (in_flight && in_flight->expects_gradients[e]) {
      wiring.outbound[e].gradients->expect(layout);
    }
  }
}

void Executor::add_loss(const Run& run, int microbatch, const at::Tensor& loss,
                        InFlight& in_flight) {
  if (microbatch == 0) {
    loss_.rows = run.rows;
  }
  if (loss.requires_grad()) {
    in_flight.loss = torch::autograd::impl::gradient_edge(loss);
    // The mean over replicas: each adds its gradients with weight 1/w.
    in_flight.loss_seed =
        loss_.weighted(at::full_like(loss, 1.0 / options_.num_replicas), microbatch);
  }
  loss_.losses.push_back(loss.tensor_data());
  if (microbatch == options_.num_microbatches - 1) {
    options_.on_loss(run.id, std::exchange(loss_, {}));
  }
}

void Executor::forward(const Run& run, int microbatch) {
  InFlight in_flight;
  in_flight.layout = run.layouts[microbatch];
  in_flight.wiring = run.wiring;
  in_flight.version = stage_->versions().version_of_batch(run.id, options_.delay);
  ForwardCall call = receive_values(run, microbatch, &in_flight);
  const double start = now();
  stage_->versions().pin(in_flight.version);
  call.slot = stage_->versions().slot(in_flight.version);
  ForwardResult result = options_.forward(std::move(call));
  if (result.loss.defined()) {
    add_loss(run, microbatch, result.loss, in_flight);
  }
  log(ActionKind::kForward, run.id, microbatch, in_flight.version, start, now());
  send_values(run, microbatch, result, &in_flight);
  in_flight.bytes = result.bytes_kept;
  bytes_in_flight_ += in_flight.bytes;
  in_flight_.emplace(std::pair(run.id, microbatch), std::move(in_flight));
  most_bytes_in_flight_ = std::max(most_bytes_in_flight_.load(), bytes_in_flight_);
  most_in_flight_ = std::max(most_in_flight_.load(), static_cast<int>(in_flight_.size()));
}

void Executor::backward(std::int64_t batch, int microbatch) {
  const auto place = in_flight_.find({batch, microbatch});
  PD2_ASSERT(place != in_flight_.end(), "backward of a microbatch that is not in flight");
  InFlight in_flight = std::move(place->second);
  in_flight_.erase(place);
  if (microbatch == 0) {
    stage_->begin_batch();
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
  const double start = now();
  if (in_flight.loss) {
    roots.push_back(*in_flight.loss);
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
  if (!roots.empty()) {
    torch::autograd::Engine::get_default_engine().execute(
        roots, gradients, /*keep_graph=*/false, /*create_graph=*/false, /*accumulate_grad=*/true);
  }
  log(ActionKind::kBackward, batch, microbatch, in_flight.version, start, sent_at.value_or(now()));
  for (std::size_t e = 0; e < wiring.inbound.size(); ++e) {
    if (in_flight.sinks[e] && !sent[e]) {
      send(e);
    }
  }
  stage_->versions().unpin(in_flight.version);
  bytes_in_flight_ -= in_flight.bytes;
}

void Executor::update(std::int64_t batch) {
  const auto submitted = updates_.find(batch);
  if (submitted == updates_.end()) {
    gradients_ready_ = batch;
    return;
  }
  const auto apply = std::move(submitted->second);
  updates_.erase(submitted);
  this->apply(batch, apply);
}

void Executor::apply(std::int64_t batch, const std::function<void(Stage&)>& apply) {
  doing_ = {ActionKind::kUpdate, batch, options_.num_microbatches - 1, false};
  const double start = now();
  for (const auto& work : stage_->start_reduction()) {
    wait_for_replicas(*work);
  }
  stage_->finish_reduction();
  apply(*stage_);
  log(ActionKind::kUpdate, batch, options_.num_microbatches - 1, stage_->versions().newest(), start,
      now());
}

void Executor::wait_for_replicas(c10d::Work& work) {
  // A collective cannot be aborted, so look whether the pipeline has failed meanwhile. On CUDA
  // wait() only orders streams and asking for completion would stop the host.
  while (!stage_->on_cuda() && !work.isCompleted()) {
    {
      const std::lock_guard lock(mutex_);
      if (closed_ || fault_->raised()) {
        throw ChannelAborted();
      }
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  work.wait();
}

void Executor::drain() {
  if (!running_) {
    return;
  }
  run_actions(options_.actions.epilogue, last_run_);
  PD2_ASSERT(in_flight_.empty(), "the epilogue left microbatches in flight");
  running_ = false;
}

void Executor::evaluate(const Run& run) {
  PD2_ASSERT(in_flight_.empty(), "evaluation needs a drained pipeline");
  const at::NoGradGuard no_grad;
  const int slot = stage_->versions().slot(stage_->versions().newest());
  for (int microbatch = 0; microbatch < static_cast<int>(run.layouts.size()); ++microbatch) {
    doing_ = {ActionKind::kForward, run.id, microbatch, true};
    ForwardCall call = receive_values(run, microbatch, nullptr);
    call.slot = slot;
    ForwardResult result = options_.forward(std::move(call));
    send_values(run, microbatch, result, nullptr);
  }
}

void Executor::log(ActionKind kind, std::int64_t batch, int microbatch, std::int64_t version,
                   double start, double end) {
  const std::lock_guard lock(mutex_);
  if (recording_) {
    record_.push_back({kind, batch, microbatch, version, start, end});
  }
}

void Executor::record(bool on) {
  const std::lock_guard lock(mutex_);
  recording_ = on;
}

std::vector<ExecutedAction> Executor::take_record() {
  const std::lock_guard lock(mutex_);
  return std::exchange(record_, {});
}

std::int64_t Executor::message_buffer_bytes() const {
  std::set<const void*> seen;  // wirings share channels
  std::int64_t sum = 0;
  const auto add = [&](const auto& channel) {
    if (seen.insert(channel.get()).second) {
      sum += channel->buffer_bytes();
    }
  };
  for (const auto& [id, wiring] : wirings_) {
    for (const InboundEdge& edge : wiring.inbound) {
      add(edge.values);
      add(edge.gradients);
    }
    for (const OutboundEdge& edge : wiring.outbound) {
      add(edge.values);
      add(edge.gradients);
    }
  }
  return sum;
}

}  // namespace pd2
