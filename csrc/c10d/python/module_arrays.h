// Collectives on arrays of the buffer protocol, for Python.
#pragma once

#include <pybind11/pybind11.h>

namespace dreamcomm {

void bind_arrays(pybind11::module_& m);

}  // namespace dreamcomm
