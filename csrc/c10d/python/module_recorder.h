// Bindings of recorders.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace dreamcomm {

void bind_records(py::module_& m);

}  // namespace dreamcomm
