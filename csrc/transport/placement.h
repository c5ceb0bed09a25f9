// Which processors the ranks of a group run on, and when a rank should move to another.
#pragma once

#include <chrono>
#include <span>
#include <vector>

#include "transport/fabric.h"

namespace dreamcomm {

/// True if `rank` should leave its processor while it waits for rank `blocker`; `cpus`
/// are the ranks' processors, `share` is how many of them belong on each.
///
/// With a processor for each rank: true if the awaited rank is on ours. Otherwise: true if more
/// than the share are on ours. Only one of those leaves, the last that is not awaited, so that they
/// do not all move to the next processor together.
bool is_in_the_way(std::span<const int> cpus, int rank, int blocker, int share);

/// Moves a thread away from a crowded processor. The kernel tends to wake a thread where its waker
/// runs. So ranks that wait for each other end up on one processor, in each other's way, while
/// other processors are idle or have fewer ranks. That lasts, and slows small calls down by a
/// factor of up to 20. A rank that notices this moves, but less and less often if that does not
/// help: where other programs use the processors too, no move may help.
class Placement {
 public:
  /// For ranks that share `cpus` processors; at least 1.
  Placement(Fabric& fabric, int cpus);

  /// Called by a rank that has waited for rank `blocker` for longer than most calls take.
  void look(int blocker);

 private:
  Fabric& fabric_;
  std::vector<int> cpus_;                       // of all ranks, at the last look
  const int share_;                             // ranks on each processor if they are spread evenly
  std::chrono::steady_clock::time_point next_;  // when to look again
  std::chrono::milliseconds pause_;             // from one look to the next
};

}  // namespace dreamcomm
