// Describes the choice of an algorithm.
#pragma once

#include <string>

#include "algorithms/table.h"

namespace dreamcomm {

/// Lists the candidates for `call` over `transport`, the pick, and why the others were passed over.
/// A line each. `heaps`: every rank has one.
std::string explain(const CallShape& call, const Preference& preference,
                    const std::string& transport, bool heaps);

}  // namespace dreamcomm
