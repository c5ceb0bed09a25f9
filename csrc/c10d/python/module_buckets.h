// Buckets and backward passes for Python.
#pragma once

#include <pybind11/pybind11.h>

namespace dreamcomm {

void bind_buckets(pybind11::module_& m);

}  // namespace dreamcomm
