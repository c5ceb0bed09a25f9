// Errors from the reports of failed kernels.
#pragma once

#include <functional>
#include <string>

#include "core/error.h"
#include "gpu/collectives/window.h"

namespace dreamcomm::gpu {

/// "all_reduce(SUM, 1024 x float32)"
std::string describe(const CallInfo& info);

/// Reports of the host on a group's ranks. Kernels know only which ranks have not arrived. Either
/// may be missing.
struct PeerReports {
  /// Names the rank that has died, or aborted the group, and what it did last; or "".
  std::function<std::string()> lost{};
  /// Says what a rank does, to follow "rank 1, which has not entered this call; "; or "".
  std::function<std::string(int rank)> does{};
};

/// The error for a report, in a group of `size` ranks. Each kind of error ends the group for
/// tensors on GPUs, because kernels that were queued after the failed one have not run.
Error error_of(const Report& report, int size, const PeerReports& peer_reports);

}  // namespace dreamcomm::gpu
