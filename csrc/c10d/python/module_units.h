// Parameters that ranks gather by units, for Python.
#pragma once

#include <pybind11/pybind11.h>

namespace dreamcomm {

void bind_units(pybind11::module_& m);

}  // namespace dreamcomm
