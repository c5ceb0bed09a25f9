// The choice of an algorithm in words.
#pragma once

#include <string>

#include "algorithms/table.h"

namespace dreamcomm {

/// The candidates for `call` over `transport`, the pick, and why the others were
/// passed over. A line each. `heaps`: every rank has one.
std::string explain(const CallShape& call, const Preference& preference,
                    const std::string& transport, bool heaps);

}  // namespace dreamcomm
