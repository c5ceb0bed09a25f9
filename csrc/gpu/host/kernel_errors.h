// What a kernel that gave up has told, in words.
#pragma once

#include <functional>
#include <string>

#include "core/error.h"
#include "gpu/collectives/window.h"

namespace dreamcomm::gpu {

/// "all_reduce(SUM, 1024 x float32)"
std::string describe(const CallInfo& info);

/// What the host knows of a group's ranks, of which kernels know only that they do not come. Either
/// may be missing.
struct PeerReports {
  /// Who has died, or aborted the group, and what it did last; or "".
  std::function<std::string()> lost{};
  /// What a rank does, to follow "rank 1, which has not come to this call; "; or "".
  std::function<std::string(int rank)> does{};
};

/// The error that a report stands for, in a group of `size` ranks. All kinds end the group
/// for tensors on GPUs: kernels that were queued behind have not run.
Error error_of(const Report& report, int size, const PeerReports& peer_reports);

}  // namespace dreamcomm::gpu
