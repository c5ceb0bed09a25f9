// Bindings of the cost model between hosts.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "c10d/backend/backend.h"

namespace dreamcomm {

void bind_between(py::module_& m);

/// A group's, as predict_between() takes them; None within one host.
py::object level_costs_of(const DreamBackend& backend);

}  // namespace dreamcomm
