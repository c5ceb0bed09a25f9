// What the backend has Python do: tell where the program is, warn, report, clean up at exit.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "c10d/backend/backend.h"

namespace dreamcomm {

/// `make_inner` makes torch's own backend for a device type. With the GIL held.
PythonCallbacks make_callbacks(pybind11::object make_inner);

void bind_interpreter(pybind11::module_& m);

}  // namespace dreamcomm
