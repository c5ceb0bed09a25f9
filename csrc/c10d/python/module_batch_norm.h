// Batch norm over the rows of several ranks, for Python.
#pragma once

#include <pybind11/pybind11.h>

namespace dreamcomm {

void bind_batch_norm(pybind11::module_& m);

}  // namespace dreamcomm
