// Which parameters modules have registered, for Python.
#pragma once

#include <pybind11/pybind11.h>

namespace dreamcomm {

/// Lists are Python's own, which its garbage collector sees.
void bind_registered(pybind11::module_& m);

}  // namespace dreamcomm
