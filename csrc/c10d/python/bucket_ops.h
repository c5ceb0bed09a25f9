// Gradient bucketing for Python: pack and unpack.
#pragma once

#include <pybind11/pybind11.h>

namespace dreamcomm {

void bind_ops(pybind11::module_& m);

}  // namespace dreamcomm
