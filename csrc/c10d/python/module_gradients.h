// The reducer of gradients for Python.
#pragma once

#include <pybind11/pybind11.h>

namespace dreamcomm {

void bind_gradients(pybind11::module_& m);

}  // namespace dreamcomm
