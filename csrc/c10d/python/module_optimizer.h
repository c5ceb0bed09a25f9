// The optimizers' steps for Python.
#pragma once

#include <pybind11/pybind11.h>

namespace dreamcomm {

void bind_optimizer(pybind11::module_& m);

}  // namespace dreamcomm
