// Executors, what is submitted to them and what they record, as Python sees them.
#include "engine/run/executor.h"

#include "bindings/bindings.h"
#include "engine/loss/loss_board.h"
#include "engine/update/batch_verdicts.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace pd2 {
namespace {

using ExecutorClass = py::class_<Executor, std::shared_ptr<Executor>>;

void bind_graphs(py::module_& module) {
  py::class_<GraphSetup>(module, "GraphSetup")
      .def(py::init([](bool always, std::optional<py::function> look,
                       std::optional<std::int64_t> most_bytes) {
             GraphSetup setup;
             setup.always = always;
             if (look) {
               setup.look = look_in_python(std::move(*look));
             }
             setup.cause_of = [](const std::exception_ptr& error) {
               return describe_exception(error, 0, [](const py::object&) { return -1; }).cause;
             };
             setup.most_bytes = most_bytes.value_or(setup.most_bytes);
             return setup;
           }),
           py::kw_only(), py::arg("always") = false, py::arg("look") = py::none(),
           py::arg("most_bytes") = py::none());
  bind_struct(
      module, "GraphReport", std::pair("num_graphs", &GraphReport::num_graphs),
      std::pair("bytes", &GraphReport::bytes), std::pair("forwards", &GraphReport::forwards),
      std::pair("backwards", &GraphReport::backwards), std::pair("others", &GraphReport::others));
  module.def(
      "has_device_graphs",
      [](c10::Device device) {
        return by_device_type<MakeDeviceGraph>().find(device.type()) != nullptr;
      },
      py::arg("device"));
  bind_registration<MakeDeviceGraph>(module, "register_device_graphs");
}

void bind_structs(py::module_& module) {
  py::class_<StageSetup>(module, "StageSetup")
      .def(py::init([](int index, std::shared_ptr<Stage> stage, py::function forward,
                       bool recompute, GraphSetup graphs) {
             return StageSetup{index, std::move(stage), forward_in_python(std::move(forward)),
                               recompute, std::move(graphs)};
           }),
           py::kw_only(), py::arg("index"), py::arg("stage"), py::arg("forward"),
           py::arg("recompute"), py::arg("graphs") = GraphSetup());
  py::class_<EdgeEnd>(module, "EdgeEnd")
      .def(py::init(
               [](std::shared_ptr<Receiver> receiver, std::shared_ptr<Sender> sender, int other) {
                 return EdgeEnd{std::move(receiver), std::move(sender), other};
               }),
           py::kw_only(), py::arg("receiver").none(false), py::arg("sender").none(false),
           py::arg("other"));
  bind_struct(module, "LossWeights", std::pair("divisor", &LossWeights::divisor),
              std::pair("factors", &LossWeights::factors));
  bind_struct(module, "Run", std::pair("id", &Run::id), std::pair("wiring", &Run::wiring),
              std::pair("layouts", &Run::layouts), std::pair("loss_weights", &Run::loss_weights),
              std::pair("batch", &Run::batch), std::pair("begins_batch", &Run::begins_batch),
              std::pair("ends_batch", &Run::ends_batch),
              std::pair("num_averaged", &Run::num_averaged),
              std::pair("replica_weight", &Run::replica_weight),
              std::pair("first_microbatch", &Run::first_microbatch), std::pair("seed", &Run::seed));
  py::class_<ExecutedAction>(module, "ExecutedAction")
      .def_readonly("stage", &ExecutedAction::stage)
      .def_property_readonly(
          "kind",
          [](const ExecutedAction& self) { return std::string(1, static_cast<char>(self.kind)); })
      .def_readonly("run", &ExecutedAction::run)
      .def_readonly("microbatch", &ExecutedAction::microbatch)
      .def_readonly("version", &ExecutedAction::version)
      .def_readonly("start", &ExecutedAction::start)
      .def_readonly("end", &ExecutedAction::end);
}

std::shared_ptr<Executor> make_executor(ExecutorSetup setup, std::shared_ptr<Fault> fault,
                                        const std::shared_ptr<LossBoard>& losses,
                                        py::function keep_error) {
  setup.on_loss = [losses](std::int64_t run, RunLoss loss, int pipeline) {
    losses->publish(run, std::move(loss), pipeline);
  };
  setup.describe = [keep = shared_python(std::move(keep_error))](const std::exception_ptr& error,
                                                                 int here) {
    return describe_exception(
        error, here, [&](const py::object& python) { return (*keep)(python).cast<int>(); });
  };
  // Python's state of the thread is made once, not for every microbatch.
  setup.run_thread = [](const std::function<void()>& loop) {
    const py::gil_scoped_acquire gil;
    const py::gil_scoped_release no_gil;
    loop();
  };
  const py::gil_scoped_release no_gil;
  return {new Executor(std::move(setup), std::move(fault)), delete_without_gil<Executor>};
}

// Makes the stage's next version: by the fused optimizers, then by `step`.
std::function<void(Stage&)> update_of(std::vector<GroupOptions> groups,
                                      std::optional<py::function> step) {
  const auto held = step ? shared_python(std::move(*step)) : nullptr;
  return [groups = std::move(groups), held](Stage& stage) {
    const int slot = stage.write_next(groups);
    if (held) {
      const py::gil_scoped_acquire gil;
      (*held)(slot);
    }
  };
}

void bind_making(ExecutorClass& executor) {
  executor
      .def(py::init([](const Schedule& schedule, int rank, int replica, int num_replicas,
                       int num_threads, std::int64_t warmup_batches, std::vector<StageSetup> stages,
                       std::shared_ptr<Fault> fault, std::shared_ptr<Discards> discards,
                       bool discards_reach_all, const std::shared_ptr<LossBoard>& losses,
                       py::function keep_error) {
             ExecutorSetup setup{.schedule = schedule,
                                 .rank = rank,
                                 .replica = replica,
                                 .num_replicas = num_replicas,
                                 .warmup_batches = warmup_batches,
                                 .num_threads = num_threads,
                                 .stages = std::move(stages),
                                 .on_loss = {},
                                 .discards = std::move(discards),
                                 .discards_reach_all = discards_reach_all};
             return make_executor(std::move(setup), std::move(fault), losses,
                                  std::move(keep_error));
           }),
           py::kw_only(), py::arg("schedule"), py::arg("rank"), py::arg("replica"),
           py::arg("num_replicas"), py::arg("num_threads"), py::arg("warmup_batches"),
           py::arg("stages"), py::arg("fault"), py::arg("discards"), py::arg("discards_reach_all"),
           py::arg("losses"), py::arg("keep_error"))
      .def(
          "set_wiring",
          [](Executor& self, int stage, int id, std::vector<EdgeEnd> inbound,
             std::vector<EdgeEnd> outbound) {
            self.worker(stage).set_wiring(id, {std::move(inbound), std::move(outbound)});
          },
          py::kw_only(), py::arg("stage"), py::arg("id"), py::arg("inbound"), py::arg("outbound"))
      .def(
          "set_clipping",
          [](Executor& self, int stage, std::optional<Clipping> clipping) {
            self.worker(stage).updates().set_clipping(std::move(clipping));
          },
          py::arg("stage"), py::arg("clipping").none(true))
      .def(
          "plan_receives",
          [](Executor& self, int wiring, const std::vector<std::pair<int, int>>& edges,
             const std::vector<JointUpdate>& joint) {
            std::vector<StageEdge> stage_edges;
            for (const auto& [from, to] : edges) {
              stage_edges.push_back({from, to});
            }
            self.plan_receives(wiring, stage_edges, joint);
          },
          py::kw_only(), py::arg("wiring"), py::arg("edges"), py::arg("joint"))
      .def("set_late_forwards", &Executor::set_late_forwards, py::arg("late"))
      .def("set_verdicts", &Executor::set_verdicts, py::arg("verdicts").none(true),
           py::call_guard<py::gil_scoped_release>())
      .def("take_back", &Executor::take_back, py::arg("batch"), py::arg("run"),
           py::call_guard<py::gil_scoped_release>())
      .def("count_anew", &Executor::count_anew)
      .def("join_here", &Executor::join_here)
      .def("wait_for_devices", &Executor::wait_for_devices,
           py::call_guard<py::gil_scoped_release>())
      .def("is_spoilt", &Executor::is_spoilt, py::arg("stage"), py::kw_only(),
           py::arg("has_buffers"))
      .def("drop_connections", &Executor::drop_connections,
           py::call_guard<py::gil_scoped_release>())
      .def("close", &Executor::close, py::call_guard<py::gil_scoped_release>());
}

void bind_submitting(ExecutorClass& executor) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  executor.def("submit_run", &Executor::submit_run, py::arg("run"), no_gil)
      .def("submit_evaluation", &Executor::submit_evaluation, py::arg("run"), no_gil)
      .def("submit_drain", &Executor::submit_drain, no_gil)
      .def(
          "submit_update",
          [](Executor& self, int stage, std::int64_t run, std::vector<GroupOptions> groups,
             std::optional<py::function> step) {
            return self.submit_update(stage, run, update_of(std::move(groups), std::move(step)));
          },
          py::kw_only(), py::arg("stage"), py::arg("run"), py::arg("groups"),
          py::arg("step").none(true))
      .def(
          "submit_copy",
          [](Executor& self, int stage, std::int64_t version, py::function copy) {
            return self.submit_copy(stage, version, [held = shared_python(std::move(copy))] {
              const py::gil_scoped_acquire gil;
              (*held)();
            });
          },
          py::kw_only(), py::arg("stage"), py::arg("version"), py::arg("copy"))
      .def(
          "wait",
          [](Executor& self, Executor::Ticket ticket) {
            wait_interruptibly([&](auto timeout) { return self.wait_for(ticket, timeout); });
          },
          py::arg("ticket"))
      .def_property_readonly("last_ticket", &Executor::last_ticket);
}

void bind_reports(ExecutorClass& executor) {
  const auto of_stage = [](auto method) {
    return [method](const Executor& self, int stage) { return (self.worker(stage).*method)(); };
  };
  executor.def("record", &Executor::record, py::arg("on"), py::call_guard<py::gil_scoped_release>())
      .def("take_record", &Executor::take_record, py::call_guard<py::gil_scoped_release>())
      .def(
          "version_of_batch",
          [](const Executor& self, int stage, std::int64_t batch) {
            return self.worker(stage).version_of_batch(batch);
          },
          py::arg("stage"), py::arg("batch"))
      .def("most_bytes_in_flight", of_stage(&StageWorker::most_bytes_in_flight), py::arg("stage"))
      .def("most_in_flight", of_stage(&StageWorker::most_in_flight), py::arg("stage"))
      .def("graph_report", of_stage(&StageWorker::graph_report), py::arg("stage"))
      .def("most_bytes_behind", of_stage(&StageWorker::most_bytes_behind), py::arg("stage"))
      .def("message_buffer_bytes", of_stage(&StageWorker::message_buffer_bytes), py::arg("stage"));
}

}  // namespace

void bind_executor(py::module_& module) {
  bind_graphs(module);
  bind_structs(module);
  py::class_<BatchVerdicts, std::shared_ptr<BatchVerdicts>>(module, "BatchVerdicts")
      .def(py::init([](int num_stages, std::shared_ptr<Discards> discards, const std::string& group,
                       std::shared_ptr<SharedBoard> shared) {
             return std::make_shared<BatchVerdicts>(num_stages, std::move(discards),
                                                    resolve_group(group), std::move(shared));
           }),
           py::kw_only(), py::arg("num_stages"), py::arg("discards"), py::arg("group"),
           py::arg("shared").none(true))
      .def("forget", &BatchVerdicts::forget)
      .def("drop_connections", &BatchVerdicts::drop_connections,
           py::call_guard<py::gil_scoped_release>());
  ExecutorClass executor(module, "Executor");
  bind_making(executor);
  bind_submitting(executor);
  bind_reports(executor);
}

}  // namespace pd2
