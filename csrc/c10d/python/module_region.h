// Memory that the ranks of a host share, for Python.
#pragma once

#include <pybind11/pybind11.h>

namespace dreamcomm {

void bind_region(pybind11::module_& m);

}  // namespace dreamcomm
