#include "c10d/python/module_units.h"

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <tuple>
#include <vector>

#include "c10d/units/lend.h"
#include "c10d/units/unit_gather.h"

namespace dreamcomm {
namespace {

using Place = std::tuple<std::int64_t, std::int64_t, std::int64_t, bool>;

std::shared_ptr<UnitGather> make_gather(const GroupPtr& group, std::int64_t number,
                                        const std::vector<Place>& places,
                                        std::vector<std::int64_t> owners) {
  std::vector<GatheredPlace> found;
  for (const auto& [offset, bytes, each, direct] : places)
    found.push_back({offset, bytes, each, direct});
  return std::make_shared<UnitGather>(group, number, std::move(found), std::move(owners));
}

}  // namespace

void bind_units(pybind11::module_& m) {
  using Released = py::call_guard<py::gil_scoped_release>;
  m.def("lend", &lend, py::arg("tensors"), py::arg("block"), py::arg("offsets"));
  m.def("take_back", &take_back, py::arg("tensors"));
  py::class_<UnitGather, std::shared_ptr<UnitGather>>(m, "UnitGather",
                                                      "Gathers the parameters of a unit.")
      .def(py::init(&make_gather), py::arg("group"), py::arg("number"), py::arg("places"),
           py::arg("owners"))
      .def("start", &UnitGather::start, py::arg("block"), py::arg("rows"), py::arg("note"),
           Released())
      .def("wait", &UnitGather::wait, Released())
      .def("drop", &UnitGather::drop, Released())
      .def_property_readonly("is_under_way", &UnitGather::is_under_way)
      .def_property_readonly("notes", &UnitGather::notes)
      .def_property_readonly("received", &UnitGather::received);
}

}  // namespace dreamcomm
