#include "engine/run/action_graphs.h"

#include "core/check.h"
#include "engine/by_device_type.h"
#include "engine/run/keyed_random.h"
#include "engine/run/recorded_draws.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <exception>
#include <span>

namespace pd2 {
namespace {

// Of a kind, before one is recorded.
constexpr int kWarmups = 2;
constexpr auto kFirst = "first microbatches";
constexpr auto kSums = "replicas add up the batch's gradients";
constexpr auto kFetches = "the batch's gradients go to the host";

// Records what `work` gives to the stream, which needs about so much memory. Throws what it throws,
// and what cannot be recorded.
template <typename Work>
void record_work(DeviceGraph& graph, std::int64_t bytes, Work work) {
  const std::lock_guard lock(recording_mutex());
  graph.begin(bytes);
  try {
    work();
  } catch (...) {
    graph.abandon();
    throw;
  }
  graph.end();
}

// ---------------------------------------------------------------- tensors at addresses that stay

// From its first element to its last one in memory.
std::int64_t span_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) {
    return 0;
  }
  std::int64_t elements = 1;
  for (std::int64_t i = 0; i < tensor.dim(); ++i) {
    elements += (tensor.size(i) - 1) * tensor.stride(i);
  }
  return elements;
}

// Writing to it does not count as a write to the tensor, which autograd may have saved.
at::Tensor flat(const at::Tensor& tensor) {
  return tensor.variable_data().as_strided({span_of(tensor)}, {1}, tensor.storage_offset());
}

// Whether the functions below can copy it.
bool is_plain(const at::Tensor& tensor) {
  return !tensor.defined() || (tensor.layout() == at::kStrided && !tensor.is_conj() &&
                               !tensor.is_neg() && !tensor.is_quantized() && tensor.has_storage());
}

// A tensor of the same sizes, strides and dtype over new memory, without a history; undefined for
// an undefined one. Kernels may depend on strides: they are kept, also of expanded tensors.
at::Tensor empty_alike(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return {};
  }
  const at::NoGradGuard no_grad;
  const auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(tensor.device());
  return at::empty({span_of(tensor)}, options)
      .as_strided(tensor.sizes(), tensor.strides(), /*storage_offset=*/0)
      .tensor_data();
}

// Gives `to`, made by empty_alike(from) or from one like it, the elements of `from`.
void copy_elements(const at::Tensor& from, const at::Tensor& to) {
  if (from.defined() && from.numel() > 0) {
    const at::NoGradGuard no_grad;
    flat(to).copy_(flat(from));
  }
}

// empty_alike() with the elements. It requires grad if `tensor` does.
at::Tensor copy_alike(const at::Tensor& tensor) {
  at::Tensor made = empty_alike(tensor);
  if (made.defined()) {
    copy_elements(tensor, made);
    made.set_requires_grad(tensor.requires_grad());
  }
  return made;
}

// Appends what tensors are, but for their elements and addresses; or a number.
void describe(std::string& text, std::int64_t number) {
  text.append(reinterpret_cast<const char*>(&number), sizeof(number));
}

void describe(std::string& text, std::span<const at::Tensor> tensors) {
  describe(text, static_cast<std::int64_t>(tensors.size()));
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined()) {
      describe(text, -1);
      continue;
    }
    describe(text, static_cast<std::int64_t>(tensor.scalar_type()));
    describe(text, tensor.requires_grad());
    describe(text, tensor.dim());
    for (std::int64_t i = 0; i < tensor.dim(); ++i) {
      describe(text, tensor.size(i));
      describe(text, tensor.stride(i));
    }
  }
}

std::vector<at::Tensor> all_inputs(const ForwardCall& call, const GivenInputs& given) {
  std::vector<at::Tensor> all = given.tensors;
  for (const Message& message : call.inbound) {
    all.insert(all.end(), message.tensors.begin(), message.tensors.end());
  }
  return all;
}

std::vector<at::Tensor> empty_alikes(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> made;
  std::ranges::transform(tensors, std::back_inserter(made), empty_alike);
  return made;
}

std::vector<at::Tensor> copies_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> made;
  std::ranges::transform(tensors, std::back_inserter(made), copy_alike);
  return made;
}

void copy_all(const std::vector<at::Tensor>& from, const std::vector<at::Tensor>& to) {
  for (std::size_t i = 0; i < from.size(); ++i) {
    copy_elements(from[i], to[i]);
  }
}

InputSink& sink_of(const NodePtr& node) { return static_cast<InputSink&>(*node); }

}  // namespace

// A recorded forward, and its recorded backwards. Whatever lies in a graph's memory goes first.
class ActionGraphs::Recording {
 public:
  struct Backward {
    std::string gradients_text;         // what it depends on: which gradients come,
    GradientPath::State before, after;  // and where the weights' go
    std::unique_ptr<DeviceGraph> graph;
    std::vector<at::Tensor> gradients;
    std::vector<std::vector<at::Tensor>> of_inputs;  // by inbound edge
  };

  std::int64_t bytes() const {
    std::int64_t sum = graph->bytes();
    for (const Backward& backward : backwards) {
      sum += backward.graph->bytes();
    }
    return sum;
  }

  std::unique_ptr<DeviceGraph> graph;
  std::optional<RecordedDraws> draws;
  std::vector<at::Tensor> inputs;
  ForwardResult result;
  History history;
  std::vector<Backward> backwards;
  std::int64_t last_use = 0;
};

std::unique_ptr<ActionGraphs> ActionGraphs::of(const ExecutorSetup& setup, const StageSetup& mine) {
  if (!mine.graphs.look) {
    return nullptr;
  }
  std::string refusal;
  if (!by_device_type<MakeDeviceGraph>().find(mine.stage->streams().device.type())) {
    refusal = detail::concat("device ", mine.stage->streams().device.str(), " records no work");
  } else if (mine.recompute) {
    refusal = "the stage recomputes";
  } else if (std::ranges::any_of(
                 setup.schedule.ranks.at(setup.rank).steady, [&](const Action& action) {
                   return action.stage == mine.index && action.kind == ActionKind::kInputGrad;
                 })) {
    refusal = "the schedule splits backwards";
  }
  return std::make_unique<ActionGraphs>(*mine.stage, mine.graphs, std::move(refusal));
}

ActionGraphs::ActionGraphs(Stage& stage, const GraphSetup& setup, std::string refusal)
    : stage_(stage),
      setup_(setup),
      make_(by_device_type<MakeDeviceGraph>().find(stage.streams().device.type())),
      refusal_(std::move(refusal)) {
  PD2_CHECK(refusal_.empty() || !setup.always, "graphs: True, but ", refusal_);
}

ForwardResult ActionGraphs::forward(ForwardCall call, const Forward& run, Use& use,
                                    History& history) {
  const GivenInputs given = setup_.look(call);
  ++uses_;
  const std::vector<at::Tensor> inputs = all_inputs(call, given);
  std::string text;
  describe(text, use.wiring);
  describe(text, use.layout);
  describe(text, given.kind);
  describe(text, inputs);
  for (const Message& message : call.inbound) {
    text += message.structure;
  }
  Kind& kind = *(use.kind = &kinds_[text]);
  if (kind.refusal.empty()) {
    const bool is_plain_all = std::ranges::all_of(inputs, is_plain);
    const std::string refusal = !refusal_.empty()        ? refusal_
                                : !given.refusal.empty() ? given.refusal
                                : !use.random_key        ? "random: 'torch'"
                                : !is_plain_all          ? "an input is no plain strided tensor"
                                                         : "";
    if (!refusal.empty()) {
      refuse(kind, "a forward", refusal);
    }
  }
  find_or_record(call, run, given, use);
  if (use.recording) {
    history = use.recording->history;
    return replay_forward(use, inputs);
  }
  count(use.reason);
  const std::int64_t draws = num_draws();
  history.add_sinks(call.inbound);
  ForwardResult result = run(std::move(call));
  history.keep_edges(result);
  ++kind.forwards;
  kind.draws = num_draws() - draws;
  kind.bytes = 2 * result.bytes_kept;  // and as much for what it does not keep
  return result;
}

ForwardResult ActionGraphs::replay_forward(const Use& use, const std::vector<at::Tensor>& inputs) {
  Recording& forward = *use.recording;
  forward.draws->seed(*use.random_key);
  copy_all(inputs, forward.inputs);
  forward.graph->replay();
  ForwardResult result = forward.result;
  for (Message& message : result.outbound) {
    message.tensors = copies_of(message.tensors);
  }
  result.loss = copy_alike(result.loss);
  result.metrics = copy_alike(result.metrics);
  forward.last_use = uses_;
  const std::lock_guard lock(mutex_);
  ++report_.forwards;
  return result;
}

void ActionGraphs::find_or_record(const ForwardCall& call, const Forward& run,
                                  const GivenInputs& given, Use& use) {
  Kind& kind = *use.kind;
  if (!kind.refusal.empty()) {
    use.reason = kind.refusal;
    return;
  }
  if (kind.forwards < kWarmups) {
    use.reason = kFirst;
    return;
  }
  auto& of_slot = kind.recorded[call.slot];
  const auto found =
      std::ranges::find_if(of_slot, [](const auto& one) { return one.use_count() == 1; });
  if (found != of_slot.end()) {
    use.recording = *found;
    return;
  }
  if (!make_room()) {
    use.reason = "no memory for more graphs";
    return;
  }
  try {
    use.recording = record(call, run, given, use);
  } catch (...) {
    refuse(kind, "a forward", setup_.cause_of(std::current_exception()));
    use.reason = kind.refusal;
    return;
  }
  of_slot.push_back(use.recording);
  update_report();
}

std::shared_ptr<ActionGraphs::Recording> ActionGraphs::record(ForwardCall call, const Forward& run,
                                                              const GivenInputs& given,
                                                              const Use& use) const {
  auto made = std::make_shared<Recording>();
  made->graph = (*make_)(nullptr);
  const std::vector<at::Tensor> inputs = all_inputs(call, given);
  made->inputs = empty_alikes(inputs);
  copy_all(inputs, made->inputs);  // a device may look at them while it records
  auto next = made->inputs.begin();
  const auto take = [&](std::vector<at::Tensor>& tensors) {
    for (at::Tensor& tensor : tensors) {
      if (tensor.defined()) {
        tensor = next->variable_data();  // with a history of its own
      }
      ++next;
    }
  };
  call.given = given.tensors;
  take(*call.given);
  for (Message& message : call.inbound) {
    take(message.tensors);
  }
  made->draws.emplace(*made->graph, stage_.streams().device, use.kind->draws, *use.random_key);
  record_work(*made->graph, use.kind->bytes, [&] {
    const RecordedDraws::Scope drawing(*made->draws);
    made->history.add_sinks(call.inbound);
    made->result = run(std::move(call));
    made->history.keep_edges(made->result);
    made->draws->check();
    for (const Message& message : made->result.outbound) {
      PD2_CHECK(std::ranges::all_of(message.tensors, is_plain),
                "an output is no plain strided tensor");
    }
  });
  made->result.bytes_kept = 0;  // the graph's memory holds them
  return made;
}

void ActionGraphs::backward(const Use& use, const Incoming& incoming, bool begins_early) {
  Kind& kind = *use.kind;
  if (use.recording && !begins_early && kind.refusal.empty() && kind.backwards >= kWarmups &&
      replay_backward(*use.recording, incoming, kind)) {
    return;
  }
  count(!use.recording          ? use.reason
        : begins_early          ? (stage_.gradients().replicas() ? kSums : kFetches)
        : !kind.refusal.empty() ? kind.refusal
                                : kFirst);
  run_autograd(incoming, /*keep_graph=*/use.recording != nullptr);
  ++kind.backwards;
}

bool ActionGraphs::replay_backward(Recording& forward, const Incoming& incoming, Kind& kind) {
  const GradientPath::State before = stage_.gradients().state();
  std::string text;
  for (const torch::autograd::Edge& root : incoming.roots) {
    describe(text, reinterpret_cast<std::intptr_t>(root.function.get()));
    describe(text, root.input_nr);
  }
  describe(text, incoming.gradients);
  auto found = std::ranges::find_if(forward.backwards, [&](const Recording::Backward& one) {
    return one.gradients_text == text && one.before == before;
  });
  if (found == forward.backwards.end()) {
    Recording::Backward made;
    made.gradients_text = std::move(text);
    made.before = before;
    made.graph = (*make_)(forward.graph.get());
    made.gradients = empty_alikes(incoming.gradients);
    copy_all(incoming.gradients, made.gradients);
    try {
      PD2_CHECK(std::ranges::all_of(incoming.gradients, is_plain),
                "a gradient is no plain strided tensor");
      const KeyedRandom none(RandomPlace{}, {.is_of_backward = true, .is_recorded = true});
      record_work(*made.graph, kind.bytes, [&] {
        run_autograd({incoming.roots, made.gradients}, /*keep_graph=*/true);
      });
    } catch (...) {
      const std::string cause = setup_.cause_of(std::current_exception());
      stage_.gradients().set_state(before);
      for (const NodePtr& sink : forward.history.sinks) {
        if (sink) {
          sink_of(sink).captured.clear();
        }
      }
      refuse(kind, "a backward", cause);
      return false;
    }
    made.after = stage_.gradients().state();
    for (const NodePtr& sink : forward.history.sinks) {
      made.of_inputs.push_back(sink ? std::exchange(sink_of(sink).captured, {})
                                    : std::vector<at::Tensor>());
    }
    forward.backwards.push_back(std::move(made));
    found = forward.backwards.end() - 1;
    update_report();
  }
  copy_all(incoming.gradients, found->gradients);
  found->graph->replay();
  stage_.gradients().set_state(found->after);
  for (std::size_t e = 0; e < found->of_inputs.size(); ++e) {
    if (forward.history.sinks[e]) {
      sink_of(forward.history.sinks[e]).captured = copies_of(found->of_inputs[e]);
    }
  }
  const std::lock_guard lock(mutex_);
  ++report_.backwards;
  return true;
}

bool ActionGraphs::make_room() {
  struct Place {
    std::vector<std::shared_ptr<Recording>>* where;
    std::shared_ptr<Recording> one;
  };
  std::vector<Place> places;
  std::int64_t bytes = 0;
  for (auto& [text, kind] : kinds_) {
    for (auto& [slot, recorded] : kind.recorded) {
      for (const auto& one : recorded) {
        places.push_back({&recorded, one});
        bytes += one->bytes();
      }
    }
  }
  // Those that take turns come again soon: to record them over and over costs more than it gains.
  const std::int64_t unused_since = uses_ - 4 * static_cast<std::int64_t>(places.size());
  std::ranges::sort(places, {}, [](const Place& place) { return place.one->last_use; });
  for (const auto& [where, one] : places) {
    if (bytes < setup_.most_bytes || one->last_use > unused_since) {
      break;
    }
    if (one.use_count() == 2) {  // here and there
      bytes -= one->bytes();
      std::erase(*where, one);
    }
  }
  return bytes < setup_.most_bytes;
}

void ActionGraphs::refuse(Kind& kind, std::string_view action, std::string_view reason) const {
  kind.refusal = reason.substr(0, reason.find('\n'));  // without a stack
  kind.recorded.clear();                               // but for those in use
  PD2_CHECK(!setup_.always, "graphs: True, but ", action, " cannot be recorded: ", kind.refusal);
}

void ActionGraphs::count(const std::string& reason) {
  const std::lock_guard lock(mutex_);
  ++report_.others[reason];
}

void ActionGraphs::update_report() {
  std::int64_t num_graphs = 0, bytes = 0;
  for (const auto& [text, kind] : kinds_) {
    for (const auto& [slot, recorded] : kind.recorded) {
      for (const auto& one : recorded) {
        num_graphs += 1 + static_cast<std::int64_t>(one->backwards.size());
        bytes += one->bytes();
      }
    }
  }
  const std::lock_guard lock(mutex_);
  report_.num_graphs = num_graphs;
  report_.bytes = bytes;
}

void ActionGraphs::clear() {
  kinds_.clear();
  update_report();
}

GraphReport ActionGraphs::report() const {
  const std::lock_guard lock(mutex_);
  return report_;
}

}  // namespace pd2
