// Times collective calls between hosts as who calls them sees them.
#pragma once

#include <cstddef>
#include <functional>

#include "core/request.h"
#include "internode/cost/model.h"

namespace dreamcomm {

/// What ranks do together; collective.
struct InStep {
  std::function<void(const Request& request, const Way& way)> run;
  std::function<double(double seconds)> slowest;  // of all ranks
};

/// Seconds of one all_reduce of so many bytes that goes so (0 bytes: a barrier), of calls in a row,
/// on this rank.
double time_of_calls(const InStep& ranks, std::size_t bytes, const Way& way,
                     Clock::time_point deadline);

}  // namespace dreamcomm
