// Messages with headers, and tensors placed in a heap, for Python.
#pragma once

#include <pybind11/pybind11.h>

namespace dreamcomm {

void bind_messages(pybind11::module_& m);

}  // namespace dreamcomm
