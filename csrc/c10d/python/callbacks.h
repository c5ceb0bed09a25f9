// The backend's callbacks into Python: call sites, warnings, reports, clean-up at exit.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "c10d/backend/backend.h"

namespace dreamcomm {

/// `make_inner` makes torch's own backend for a device type. With the GIL held.
PythonCallbacks make_callbacks(pybind11::object make_inner);

void bind_interpreter(pybind11::module_& m);

}  // namespace dreamcomm
