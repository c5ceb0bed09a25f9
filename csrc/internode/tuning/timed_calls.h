// Times collective calls between hosts as their callers see them.
#pragma once

#include <cstddef>
#include <functional>

#include "core/request.h"
#include "internode/cost/model.h"

namespace dreamcomm {

/// Steps that all ranks take together; collective.
struct InStep {
  std::function<void(const Request& request, const Way& way)> run;
  std::function<double(double seconds)> slowest;  // the largest of all ranks
};

/// Seconds, on this rank, of one of several all_reduces in a row, of so many bytes and this way (0
/// bytes: a barrier).
double time_of_calls(const InStep& ranks, std::size_t bytes, const Way& way,
                     Clock::time_point deadline);

}  // namespace dreamcomm
