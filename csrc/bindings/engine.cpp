// The engine, as Python sees it.
#include "bindings/bindings.h"
#include "bindings/groups.h"
#include "bindings/interruptible_wait.h"
#include "core/check.h"
#include "engine/channels/local_channel.h"
#include "engine/channels/process_group_channel.h"
#include "engine/loss/loss_board.h"
#include "engine/run/executor.h"
#include "engine/run/private_generator.h"
#include "engine/stage/stage.h"
#include "engine/weights/fused_optimizer.h"
#include "testing/delayed_sender.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace pd2 {
namespace {

// For what ends a thread of its own, which may be waiting for the interpreter when Python drops the
// last reference.
template <typename T>
void delete_without_gil(T* object) {
  const py::gil_scoped_acquire gil;
  const py::gil_scoped_release no_gil;
  delete object;
}

// The text of an exception with the Python traceback, if there is one.
std::string describe(const std::exception_ptr& error) {
  const py::gil_scoped_acquire gil;
  const auto format = [](const py::error_already_set& error) {
    // An exception out of C++ does not know its traceback itself.
    const py::object trace = error.trace() ? error.trace() : py::none();
    const py::object lines = py::module_::import("traceback")
                                 .attr("format_exception")(error.type(), error.value(), trace);
    return py::str("").attr("join")(lines).cast<std::string>();
  };
  try {
    std::rethrow_exception(error);
  } catch (py::error_already_set& python) {
    return "\n" + format(python);
  } catch (python_error& python) {  // a Python autograd function's, out of the autograd engine
    python.restore();
    return "\n" + format(py::error_already_set());
  } catch (const std::exception& other) {
    return other.what();
  } catch (...) {
    return "unknown exception";
  }
}

py::list to_python(std::vector<Message>& messages) {
  py::list list;
  for (Message& message : messages) {
    list.append(py::make_tuple(py::bytes(message.structure), std::move(message.tensors)));
  }
  return list;
}

// forward(run, microbatch, slot, inbound, again, loss_scale) -> (outbound, loss or None, bytes
// kept, metrics or None), messages being (structure, tensors).
ForwardResult call_forward(const py::function& function, ForwardCall call) {
  const py::gil_scoped_acquire gil;
  const py::tuple result = function(call.run, call.microbatch, call.slot, to_python(call.inbound),
                                    call.again, call.loss_scale);
  call.inbound.clear();
  ForwardResult out;
  for (const py::handle item : result[0]) {
    const auto pair = py::cast<py::tuple>(item);
    Message message;
    message.structure = pair[0].cast<std::string>();
    message.tensors = pair[1].cast<std::vector<at::Tensor>>();
    out.outbound.push_back(std::move(message));
  }
  if (!result[1].is_none()) {
    out.loss = result[1].cast<at::Tensor>();
  }
  out.bytes_kept = result[2].cast<std::int64_t>();
  if (!result[3].is_none()) {
    out.metrics = result[3].cast<at::Tensor>();
  }
  return out;
}

// A Python object that C++ threads may drop.
template <typename T>
std::shared_ptr<T> shared_python(T object) {
  return std::shared_ptr<T>(new T(std::move(object)), [](T* held) {
    const py::gil_scoped_acquire gil;
    delete held;
  });
}

OptimizerKind parse_optimizer(const std::string& kind) {
  PD2_CHECK(kind == "sgd" || kind == "adam", "fused optimizer: ", kind, ", known: sgd, adam");
  return kind == "sgd" ? OptimizerKind::kSgd : OptimizerKind::kAdam;
}

// Hyper-parameters by the names that torch.optim gives them; absent ones keep their defaults.
std::vector<GroupOptions> parse_groups(const py::list& groups) {
  std::vector<GroupOptions> parsed;
  for (const py::handle item : groups) {
    const auto group = py::cast<py::dict>(item);
    const auto read = [&group](const char* name, auto& value) {
      if (group.contains(name)) {
        value = group[name].cast<std::decay_t<decltype(value)>>();
      }
    };
    GroupOptions options;
    read("lr", options.sgd.lr);
    read("momentum", options.sgd.momentum);
    read("dampening", options.sgd.dampening);
    read("weight_decay", options.sgd.weight_decay);
    read("nesterov", options.sgd.nesterov);
    read("maximize", options.sgd.maximize);
    read("lr", options.adam.lr);
    read("beta1", options.adam.beta1);
    read("beta2", options.adam.beta2);
    read("eps", options.adam.eps);
    read("weight_decay", options.adam.weight_decay);
    read("decoupled_weight_decay", options.adam.decoupled_weight_decay);
    read("amsgrad", options.adam.amsgrad);
    read("maximize", options.adam.maximize);
    parsed.push_back(options);
  }
  return parsed;
}

}  // namespace

void bind_optimizer(py::module_& module) {
  py::class_<FusedOptimizer>(module, "FusedOptimizer")
      .def(py::init([](const std::string& kind,
                       const std::vector<std::tuple<std::int64_t, std::int64_t, int>>& slices,
                       const at::Tensor& flat_example) {
             std::vector<ParameterSlice> parsed;
             for (const auto& [offset, numel, group] : slices) {
               parsed.push_back({offset, numel, group});
             }
             return std::make_unique<FusedOptimizer>(parse_optimizer(kind), std::move(parsed),
                                                     flat_example);
           }),
           py::arg("kind"), py::arg("slices"), py::arg("flat_example"))
      .def(
          "step",
          [](FusedOptimizer& self, const at::Tensor& w, const at::Tensor& gradient,
             const at::Tensor& w_out, const py::list& groups, const std::vector<bool>& has_gradient,
             const std::optional<at::Tensor>& master) {
            const std::vector<GroupOptions> parsed = parse_groups(groups);
            const py::gil_scoped_release no_gil;
            self.step(w, gradient, w_out, parsed, has_gradient, master.value_or(at::Tensor()));
          },
          py::arg("w"), py::arg("gradient"), py::arg("w_out"), py::arg("groups"),
          py::arg("has_gradient"), py::arg("master") = py::none())
      .def("state", &FusedOptimizer::state)
      .def("set_state", &FusedOptimizer::set_state)
      .def("step_count", &FusedOptimizer::step_count)
      .def("set_step_count", &FusedOptimizer::set_step_count)
      .def("state_bytes", &FusedOptimizer::state_bytes);
}

void bind_stage(py::module_& module) {
  py::class_<CopySum, std::shared_ptr<CopySum>>(module, "CopySum").def(py::init<>());
  py::class_<TiedSum, std::shared_ptr<TiedSum>>(module, "TiedSum")
      .def(py::init([](std::vector<int> processes, const std::string& group) {
             return std::make_shared<TiedSum>(std::move(processes), resolve_group(group));
           }),
           py::arg("processes"), py::arg("group"));
  py::class_<Stage, std::shared_ptr<Stage>>(module, "Stage")
      .def(py::init([](const std::vector<at::Tensor>& parameters, std::vector<std::string> names,
                       int num_versions, const std::string& replica_group,
                       std::int64_t bucket_bytes, std::shared_ptr<CopySum> copy_sum, int copy,
                       std::vector<at::ScalarType> dtypes, bool split_master) {
             return std::make_shared<Stage>(parameters, std::move(names), num_versions,
                                            resolve_group(replica_group), bucket_bytes,
                                            CopySumEnd{std::move(copy_sum), copy},
                                            StagePrecision{std::move(dtypes), split_master});
           }),
           py::arg("parameters"), py::arg("names"), py::arg("num_versions"),
           py::arg("replica_group"), py::arg("bucket_bytes"), py::arg("copy_sum").none(true),
           py::arg("copy"), py::arg("dtypes") = std::vector<at::ScalarType>(),
           py::arg("split_master") = false)
      .def("weight", &Stage::weight, py::arg("slot"), py::arg("parameter"))
      .def("master", &Stage::master, py::arg("slot"), py::arg("parameter"))
      .def("has_split_master", &Stage::has_split_master, py::arg("parameter"))
      .def("master_buffers", &Stage::master_buffers)
      .def("round_masters", &Stage::round_masters, py::arg("slot"))
      .def("set_split_master", &Stage::set_split_master, py::arg("parameter"), py::arg("value"))
      .def("gradient", &Stage::gradient, py::arg("parameter"))
      .def("has_gradient", &Stage::has_gradient, py::arg("parameter"))
      .def("slot_buffers", &Stage::slot_buffers, py::arg("slot"))
      .def("tie", &Stage::tie, py::arg("sum"), py::arg("copy"), py::arg("parameters"))
      .def("attach", &Stage::attach, py::arg("parameter"), py::arg("slot_parameter"))
      .def_property_readonly("newest_version",
                             [](const Stage& self) { return self.versions().newest(); })
      .def_property_readonly(
          "newest_slot",
          [](const Stage& self) { return self.versions().slot(self.versions().newest()); })
      .def_property_readonly("num_versions", &Stage::num_versions)
      .def_property_readonly("num_slots", &Stage::num_slots)
      .def_property_readonly("most_live_versions",
                             [](const Stage& self) { return self.versions().most_live_versions(); })
      .def(
          "set_optimizers",
          [](Stage& self, const std::map<std::string, std::vector<int>>& groups_by_kind) {
            std::vector<OptimizerGroups> optimizers;
            for (const auto& [kind, of_parameter] : groups_by_kind) {
              optimizers.push_back({parse_optimizer(kind), of_parameter});
            }
            self.set_optimizers(optimizers);
          },
          py::arg("groups_by_kind"))
      .def("optimizer_state", &Stage::optimizer_state, py::arg("name"), py::arg("parameter"))
      .def("set_optimizer_state", &Stage::set_optimizer_state, py::arg("name"),
           py::arg("parameter"), py::arg("value"))
      .def("step_count", &Stage::step_count, py::arg("parameter"))
      .def("set_step_count", &Stage::set_step_count, py::arg("parameter"), py::arg("count"))
      .def(
          "arrange",
          [](Stage& self, bool reads_first, bool waits, const std::shared_ptr<Fault>& fault) {
            self.arrange(reads_first, waits, [&fault] { return fault->raised(); });
          },
          py::arg("reads_first"), py::arg("waits"), py::arg("fault"),
          py::call_guard<py::gil_scoped_release>())
      .def("restart_delay", &Stage::restart_delay)
      .def("bytes", [](const Stage& self) {
        const StageBytes bytes = self.bytes();
        py::dict report;
        report["weights"] = bytes.weights;
        report["masters"] = bytes.masters;
        report["gradients"] = bytes.gradients;
        report["optimizer_state"] = bytes.optimizer_state;
        report["padding"] = bytes.padding;
        return report;
      });
}

void bind_channels(py::module_& module) {
  // Stages send and receive in the engine; from Python links are measured.
  py::class_<Sender, std::shared_ptr<Sender>>(module, "Sender")
      .def(
          "send",
          [](Sender& self, LayoutId layout, std::vector<at::Tensor> tensors) {
            Message message;
            message.requires_grad.assign(tensors.size(), false);
            message.tensors = std::move(tensors);
            self.send(layout, std::move(message));
          },
          py::arg("layout"), py::arg("tensors"), py::call_guard<py::gil_scoped_release>());
  py::class_<Receiver, std::shared_ptr<Receiver>>(module, "Receiver")
      .def("expect", &Receiver::expect, py::arg("layout"), py::call_guard<py::gil_scoped_release>())
      .def(
          "receive", [](Receiver& self) { return self.receive().tensors; },
          py::call_guard<py::gil_scoped_release>());
  py::class_<LocalChannel, Sender, Receiver, std::shared_ptr<LocalChannel>>(
      module, "LocalChannel", py::multiple_inheritance())
      .def(py::init<c10::Device>(), py::arg("destination"));
  py::class_<DelayedSender, Sender, std::shared_ptr<DelayedSender>>(module, "DelayedSender")
      .def(py::init([](std::shared_ptr<Sender> sender, double shortest, double longest,
                       std::uint64_t seed) {
             return std::shared_ptr<DelayedSender>(
                 new DelayedSender(std::move(sender), DelayedSender::Seconds(shortest),
                                   DelayedSender::Seconds(longest), seed),
                 delete_without_gil<DelayedSender>);
           }),
           py::arg("sender"), py::arg("shortest"), py::arg("longest"), py::arg("seed"));
  py::class_<ProcessGroupSender, Sender, std::shared_ptr<ProcessGroupSender>>(module,
                                                                              "ProcessGroupSender")
      .def(py::init([](const std::string& group, int peer, c10::Device device,
                       std::size_t max_unawaited, std::shared_ptr<SharedRing> ring) {
             return std::make_shared<ProcessGroupSender>(resolve_group(group), peer, device,
                                                         max_unawaited, std::move(ring));
           }),
           py::arg("group"), py::arg("peer"), py::arg("device"), py::arg("max_unawaited"),
           py::arg("ring"));
  py::class_<ProcessGroupReceiver, Receiver, std::shared_ptr<ProcessGroupReceiver>>(
      module, "ProcessGroupReceiver")
      .def(py::init([](const std::string& group, int peer, c10::Device device,
                       std::size_t posted_ahead, std::shared_ptr<SharedRing> ring) {
             return std::make_shared<ProcessGroupReceiver>(resolve_group(group), peer, device,
                                                           posted_ahead, std::move(ring));
           }),
           py::arg("group"), py::arg("peer"), py::arg("device"), py::arg("posted_ahead"),
           py::arg("ring"));
}

void bind_generator(py::module_& module) {
  module.def("draw_seed", &draw_seed);
  module.def("next_seed", &next_seed);
  struct Entered {
    std::optional<std::uint64_t> seed;
    std::optional<PrivateGenerator> generator;
  };
  py::class_<Entered>(module, "PrivateGenerator")
      .def(py::init([](std::optional<std::uint64_t> seed) {
             auto made = std::make_unique<Entered>();
             made->seed = seed;
             return made;
           }),
           py::arg("seed"))
      .def("__enter__", [](Entered& self) { self.generator.emplace(self.seed); })
      .def("__exit__", [](Entered& self, const py::args&) { self.generator.reset(); });
}

void bind_executor(py::module_& module) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<Executor, std::shared_ptr<Executor>>(module, "Executor")
      .def(py::init(
               [](const Schedule& schedule, int rank, int replica, int num_replicas,
                  int num_threads, std::uint64_t seed, std::int64_t warmup_batches,
                  std::vector<std::tuple<int, std::shared_ptr<Stage>, py::function, bool, bool>> stages,
                  std::shared_ptr<Fault> fault, std::shared_ptr<LossBoard> losses) {
                 std::vector<std::unique_ptr<StageWorker>> workers;
                 for (auto& [stage, state, forward, recompute, recomputes_blocks] : stages) {
                   StageWorkerOptions options;
                   options.stage = stage;
                   options.num_replicas = num_replicas;
                   options.num_microbatches = schedule.num_microbatches;
                   options.delay = schedule.delay.at(stage);
                   options.warmup_batches = warmup_batches;
                   options.recompute = recompute;
                   options.recomputes_blocks = recomputes_blocks;
                   options.seed = mix_seed(seed, replica);
                   options.forward = [held = shared_python(std::move(forward))](ForwardCall call) {
                     return call_forward(*held, std::move(call));
                   };
                   const int pipeline = schedule.pipeline(stage);
                   options.first_microbatch = pipeline * schedule.num_microbatches;
                   options.on_loss = [losses, pipeline](std::int64_t run, BatchLoss loss) {
                     losses->publish(run, std::move(loss), pipeline);
                   };
                   workers.push_back(
                       std::make_unique<StageWorker>(std::move(options), std::move(state)));
                 }
                 ExecutorOptions options;
                 options.rank = rank;
                 options.replica = replica;
                 options.num_replicas = num_replicas;
                 options.num_microbatches = schedule.num_microbatches;
                 options.num_pipelines = schedule.num_pipelines;
                 options.depth = schedule.depth();
                 options.warmup_batches = warmup_batches;
                 options.actions = schedule.ranks.at(rank);
                 options.num_threads = num_threads;
                 options.describe = describe;
                 // Python's state of the thread is made once, not for every microbatch.
                 options.run_thread = [](const std::function<void()>& loop) {
                   const py::gil_scoped_acquire gil;
                   const py::gil_scoped_release no_gil;
                   loop();
                 };
                 const py::gil_scoped_release no_gil;
                 return std::shared_ptr<Executor>(
                     new Executor(std::move(options), std::move(workers), std::move(fault)),
                     delete_without_gil<Executor>);
               }),
           py::arg("schedule"), py::arg("rank"), py::arg("replica"), py::arg("num_replicas"),
           py::arg("num_threads"), py::arg("seed"), py::arg("warmup_batches"), py::arg("stages"),
           py::arg("fault"), py::arg("losses"))
      .def(
          "set_wiring",
          [](Executor& self, int stage, int id,
             const std::vector<std::tuple<int, std::shared_ptr<Receiver>, std::shared_ptr<Sender>>>&
                 inbound,
             const std::vector<std::tuple<int, std::shared_ptr<Sender>, std::shared_ptr<Receiver>>>&
                 outbound) {
            Wiring wiring;
            for (const auto& [producer, values, gradients] : inbound) {
              wiring.inbound.push_back({producer, values, gradients});
            }
            for (const auto& [consumer, values, gradients] : outbound) {
              wiring.outbound.push_back({consumer, values, gradients});
            }
            self.worker(stage).set_wiring(id, std::move(wiring));
          },
          py::arg("stage"), py::arg("id"), py::arg("inbound"), py::arg("outbound"))
      .def(
          "submit_batch",
          [](Executor& self, std::int64_t run, int wiring, std::vector<LayoutId> layouts,
             std::vector<std::int64_t> rows, std::int64_t batch, bool begins_batch, bool ends_batch,
             int num_averaged) {
            return self.submit_batch({run, wiring, std::move(layouts), std::move(rows), batch,
                                      begins_batch, ends_batch, num_averaged});
          },
          py::arg("run"), py::arg("wiring"), py::arg("layouts"), py::arg("rows"), py::arg("batch"),
          py::arg("begins_batch"), py::arg("ends_batch"), py::arg("num_averaged"), no_gil)
      .def(
          "submit_evaluation",
          [](Executor& self, std::int64_t run, int wiring, std::vector<LayoutId> layouts) {
            return self.submit_evaluation({run, wiring, std::move(layouts), {}});
          },
          py::arg("run"), py::arg("wiring"), py::arg("layouts"), no_gil)
      .def(
          "set_clipping",
          [](Executor& self, int stage, std::shared_ptr<GradientNorm> norm, double max_norm,
             std::vector<std::int64_t> parameters, bool gives_norms, std::optional<double> max_value,
             std::shared_ptr<LossScale> loss_scale) {
            self.worker(stage).updates().set_clipping(
                norm || max_value
                    ? std::optional(Clipping{std::move(norm), max_norm, std::move(parameters),
                                             gives_norms, max_value, std::move(loss_scale)})
                    : std::nullopt);
          },
          py::arg("stage"), py::arg("norm").none(true), py::arg("max_norm"),
          py::arg("parameters"), py::arg("gives_norms"), py::arg("max_value"),
          py::arg("loss_scale").none(true))
      .def("version_of_batch",
           [](const Executor& self, int stage, std::int64_t batch) {
             return self.worker(stage).version_of_batch(batch);
           },
           py::arg("stage"), py::arg("batch"))
      .def("submit_drain", &Executor::submit_drain, no_gil)
      .def(
          "submit_update",
          [](Executor& self, int stage, std::int64_t run, const py::list& groups,
             std::optional<py::function> step) {
            const auto held = step ? shared_python(std::move(*step)) : nullptr;
            return self.submit_update(stage, run,
                                      [parsed = parse_groups(groups), held](Stage& stage) {
                                        const int slot = stage.write_next(parsed);
                                        if (held) {
                                          const py::gil_scoped_acquire gil;
                                          (*held)(slot);
                                        }
                                      });
          },
          py::arg("stage"), py::arg("run"), py::arg("groups"), py::arg("step").none(true))
      .def(
          "wait",
          [](Executor& self, Executor::Ticket ticket) {
            wait_interruptibly([&](auto timeout) { return self.wait_for(ticket, timeout); });
          },
          py::arg("ticket"))
      .def_property_readonly("last_ticket", &Executor::last_ticket)
      .def("drop_connections", &Executor::drop_connections, no_gil)
      .def("close", &Executor::close, no_gil)
      .def("record", &Executor::record, py::arg("on"), no_gil)
      .def("take_record",
           [](Executor& self) {
             py::list rows;
             for (const ExecutedAction& action : self.take_record()) {
               rows.append(py::make_tuple(
                   action.stage, std::string(1, static_cast<char>(action.kind)), action.run,
                   action.microbatch, action.version, action.start, action.end));
             }
             return rows;
           })
      .def(
          "most_bytes_in_flight",
          [](const Executor& self, int stage) { return self.worker(stage).most_bytes_in_flight(); })
      .def("most_in_flight",
           [](const Executor& self, int stage) { return self.worker(stage).most_in_flight(); })
      .def("message_buffer_bytes", [](const Executor& self, int stage) {
        return self.worker(stage).message_buffer_bytes();
      });
}

}  // namespace pd2
