// The extension module of the checked device (tests/device/_checked.pyi).
#include "checked_device/allocator.h"
#include "checked_device/generator.h"
#include "checked_device/graph.h"
#include "checked_device/hooks.h"
#include "checked_device/host_accesses.h"
#include "checked_device/kernel.h"
#include "checked_device/memory_sharing.h"
#include "checked_device/passes.h"
#include "checked_device/process_group.h"
#include "checked_device/runtime.h"

#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>

namespace pd2 {
namespace {

void bind_runtime(py::module_& module) {
  py::enum_<Ordering>(module, "Ordering")
      .value("STREAM_WAIT", Ordering::stream_wait)
      .value("RECORD_STREAM", Ordering::record_stream)
      .value("HOST_WAIT", Ordering::host_wait)
      .value("PEER_WAIT", Ordering::peer_wait);
  py::enum_<Verdict>(module, "Verdict")
      .value("IMPLIED", Verdict::implied)
      .value("UNNEEDED", Verdict::unneeded)
      .value("OPEN", Verdict::open);
  module.attr("NUM_DEVICES") = Runtime::kDevices;
  module.def(
      "set_drains",
      [](bool at_first_use, double probability, std::uint64_t seed) {
        Runtime::instance().set_drains({at_first_use, probability, seed});
      },
      py::kw_only(), py::arg("at_first_use"), py::arg("probability"), py::arg("seed"));
  module.def("set_clock_rate", &set_clock_rate);
  module.def("num_launches", [] { return Runtime::instance().num_launches(); });
  module.def("num_drains", [] { return Runtime::instance().num_drains(); });
  py::enum_<Asked::Kind>(module, "AskedKind")
      .value("LAUNCH", Asked::Kind::launch)
      .value("TRANSFER", Asked::Kind::transfer)
      .value("HOST_WAIT", Asked::Kind::host_wait);
  py::class_<Asked>(module, "Asked")
      .def_readonly("kind", &Asked::kind)
      .def_readonly("name", &Asked::name)
      .def_readonly("stream", &Asked::stream)
      .def_readonly("thread", &Asked::thread);
  module.def("start_log", [] { Runtime::instance().start_log(); });
  module.def("stop_log", [] { return Runtime::instance().stop_log(); });
  module.def("set_timeout", [](double seconds) {
    Runtime::instance().set_timeout(std::chrono::duration<double>(seconds));
  });
  module.def("priority_of",
             [](StreamNumber stream) { return Runtime::instance().priority_of(stream); });
  module.def("set_one_queue", [](bool is_one) { Runtime::instance().set_one_queue(is_one); });
  module.def("drop_nth",
             [](Ordering kind, std::uint64_t n) { Runtime::instance().drop_nth(kind, n); });
  module.def("count", [](Ordering kind) { return Runtime::instance().count(kind); });
  module.def("verdict", [] { return Runtime::instance().verdict(); });
  module.def("errors", [] { return Runtime::instance().errors(); });
  module.def("clear_errors", [] { Runtime::instance().clear_errors(); });
  module.def("settle_memory", &settle_memory);
  module.def("set_sharing_delay",
             [](double seconds) { set_sharing_delay(std::chrono::duration<double>(seconds)); });
  module.def("default_generator", [](int device) { return default_generator(device); });
  module.def(
      "access",
      [](std::uintptr_t pointer, std::size_t bytes, bool is_write, const std::string& name) {
        const KernelUse use{reinterpret_cast<const void*>(pointer), bytes, is_write};
        access({&use, 1}, name);
      },
      py::arg("pointer"), py::arg("bytes"), py::arg("is_write"), py::arg("name"));
}

void bind_graph(py::module_& module) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<DeviceGraph>(module, "Graph")
      .def(py::init([](const DeviceGraph* beside) { return kCheckedGraphs(beside); }),
           py::arg("beside") = py::none())
      .def("begin", &DeviceGraph::begin, py::arg("bytes") = 0, no_gil)
      .def("end", &DeviceGraph::end, no_gil)
      .def("abandon", &DeviceGraph::abandon, no_gil)
      .def("generator", &DeviceGraph::generator, py::arg("seed"))
      .def("replay", &DeviceGraph::replay, no_gil)
      .def_property_readonly("bytes", &DeviceGraph::bytes);
}

void bind_process_group(py::module_& module) {
  module.def(
      "process_group",
      [](c10::intrusive_ptr<c10d::Store> store, c10::intrusive_ptr<c10d::Backend> gloo,
         std::chrono::milliseconds timeout) -> c10::intrusive_ptr<c10d::Backend> {
        return c10::make_intrusive<CheckedProcessGroup>(
            CheckedProcessGroup::Below{std::move(store), std::move(gloo)}, timeout);
      },
      py::kw_only(), py::arg("store"), py::arg("gloo"), py::arg("timeout"));
  module.def("last_timeout_set", &CheckedProcessGroup::last_timeout_set);
  module.def("num_connections", &CheckedProcessGroup::num_connections);
  module.def("set_eager_sends", &CheckedProcessGroup::set_eager_sends);
}

}  // namespace
}  // namespace pd2

PYBIND11_MODULE(_checked, module) {
  pd2::register_allocator();
  pd2::register_hooks();
  pd2::check_host_accesses();
  pd2::bind_runtime(module);
  pd2::bind_graph(module);
  pd2::bind_process_group(module);
  const py::module_ package = py::module_::import("pipedream2bw._C");
  const int type = static_cast<int>(c10::DeviceType::PrivateUse1);
  package.attr("register_device_passes")(type, py::capsule(&pd2::checked_passes()));
  package.attr("register_device_memory_sharing")(type, py::capsule(&pd2::checked_memory_sharing()));
  package.attr("register_device_graphs")(type, py::capsule(&pd2::kCheckedGraphs));
}
