// Replicas of a module in threads, for Python.
#pragma once

#include <pybind11/pybind11.h>

namespace dreamcomm {

void bind_replicas(pybind11::module_& m);

}  // namespace dreamcomm
