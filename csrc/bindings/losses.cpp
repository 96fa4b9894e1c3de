// Losses, as Python sees them.
#include "bindings/bindings.h"
#include "engine/fault.h"
#include "engine/loss/loss_board.h"
#include "transport/shared_board.h"

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace pd2 {

void bind_losses(py::module_& module) {
  py::class_<AwaitedNumbers, std::shared_ptr<AwaitedNumbers>>(module, "AwaitedNumbers")
      .def("done", &AwaitedNumbers::are_there)
      .def("wait", [](const AwaitedNumbers& self) {
        wait_interruptibly([&](auto timeout) { return self.wait_for(timeout); });
        const py::gil_scoped_release no_lock;  // a device may have to come to them
        return self.get();
      });
  py::class_<LossBoard, std::shared_ptr<LossBoard>>(module, "LossBoard")
      .def(py::init([](std::shared_ptr<Fault> fault, const std::string& group,
                       std::shared_ptr<SharedBoard> shared, std::vector<int> ranks, int replica,
                       int num_replicas, int num_parts, int first_part, int num_numbers,
                       int runs_behind) {
             const LossBoardOptions options{.ranks = std::move(ranks),
                                            .replica = replica,
                                            .num_replicas = num_replicas,
                                            .num_parts = num_parts,
                                            .first_part = first_part,
                                            .num_numbers = num_numbers,
                                            .runs_behind = runs_behind};
             return std::make_shared<LossBoard>(options, std::move(fault), resolve_group(group),
                                                std::move(shared));
           }),
           py::kw_only(), py::arg("fault"), py::arg("group"), py::arg("shared"), py::arg("ranks"),
           py::arg("replica"), py::arg("num_replicas"), py::arg("num_parts"), py::arg("first_part"),
           py::arg("num_numbers"), py::arg("runs_behind"))
      // Without Python's lock: the board posts its sends under its own, and a process group may
      // need Python's for that, if only to free an earlier call's tensors.
      .def("expect", &LossBoard::expect, py::arg("run"), py::call_guard<py::gil_scoped_release>())
      .def(
          "finish",
          [](LossBoard& self, double timeout) {
            const auto deadline =
                std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout);
            bool are_there = false;
            wait_interruptibly([&](auto slice) {
              are_there = self.finish_for(slice);
              return are_there || std::chrono::steady_clock::now() > deadline;
            });
            return are_there;
          },
          py::arg("timeout"))
      .def("drain", &LossBoard::drain, py::call_guard<py::gil_scoped_release>())
      .def("close", &LossBoard::close, py::call_guard<py::gil_scoped_release>());
}

}  // namespace pd2
