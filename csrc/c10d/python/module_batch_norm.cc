#include "c10d/python/module_batch_norm.h"

#include <torch/csrc/utils/pybind.h>

#include <tuple>

#include "c10d/batch_norm/batch_norm.h"

namespace dreamcomm {
namespace {

std::tuple<std::int64_t, at::Tensor, at::Tensor> joined(const at::Tensor& rows, std::int64_t header,
                                                        c10::ScalarType type) {
  const JoinedStatistics found = join_statistics(rows, header, type);
  return {found.count, found.mean, found.variance};
}

}  // namespace

void bind_batch_norm(pybind11::module_& m) {
  using Released = py::call_guard<py::gil_scoped_release>;
  m.def("statistics_row", &statistics_row, py::arg("header"), py::arg("count"), py::arg("channels"),
        py::arg("mean"), py::arg("variance"));
  m.def("join_statistics", &joined, py::arg("rows"), py::arg("header"), py::arg("dtype"));
  m.def("take_into_running", &take_into_running, py::arg("buffer"), py::arg("found"),
        py::arg("factor"), py::arg("share"));
  m.def("batch_norm_input_gradient", &batch_norm_input_gradient, py::arg("gradient"),
        py::arg("input"), py::arg("weight"), py::arg("mean"), py::arg("variance"), py::arg("eps"),
        py::arg("sums"), py::arg("count"), Released());
}

}  // namespace dreamcomm
