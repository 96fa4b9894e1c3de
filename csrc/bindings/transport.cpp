// Memory that processes share, as Python sees it.
#include "bindings/bindings.h"
#include "transport/shared_board.h"
#include "transport/shared_ring.h"

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace pd2 {
namespace {

// Python's None if there is none.
template <typename T>
std::shared_ptr<T> or_none(std::unique_ptr<T> object) {
  return std::shared_ptr<T>(std::move(object));
}

}  // namespace

void bind_transport(py::module_& module) {
  py::class_<SharedRing, std::shared_ptr<SharedRing>>(module, "SharedRing")
      .def_static(
          "create",
          [](std::uint32_t num_slots, double timeout) {
            return or_none(SharedRing::create(num_slots, SharedRing::Timeout(timeout)));
          },
          py::arg("num_slots"), py::arg("timeout"))
      .def_static(
          "open",
          [](const std::string& address, double timeout) {
            return or_none(SharedRing::open(address, SharedRing::Timeout(timeout)));
          },
          py::arg("address"), py::arg("timeout"))
      .def_property_readonly("address", &SharedRing::address);
  py::class_<SharedBoard, std::shared_ptr<SharedBoard>>(module, "SharedBoard")
      .def_static(
          "create",
          [](int num_ranks, int row_size, double timeout) {
            return or_none(SharedBoard::create(num_ranks, row_size, SharedBoard::Timeout(timeout)));
          },
          py::arg("num_ranks"), py::arg("row_size"), py::arg("timeout"))
      .def_static(
          "open",
          [](const std::string& address, int rank, double timeout) {
            return or_none(SharedBoard::open(address, rank, SharedBoard::Timeout(timeout)));
          },
          py::arg("address"), py::arg("rank"), py::arg("timeout"))
      .def_property_readonly("address", &SharedBoard::address)
      .def(
          "begin_exchange",
          [](SharedBoard& self, const std::vector<std::int64_t>& row) { self.begin_exchange(row); },
          py::arg("row"))
      .def(
          "finish_exchange",
          [](SharedBoard& self, double timeout) {
            return self.finish_exchange(SharedBoard::Timeout(timeout));
          },
          py::arg("timeout"), py::call_guard<py::gil_scoped_release>())
      .def("leave", &SharedBoard::leave);
}

}  // namespace pd2
