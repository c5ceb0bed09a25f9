// Which processors the ranks of a group run on, and when one should leave a crowd.
#pragma once

#include <chrono>
#include <span>
#include <vector>

#include "transport/fabric.h"

namespace dreamcomm {

/// Whether `rank` should leave its processor while it waits for rank `blocker`; `cpus`
/// are the ranks' processors, `share` is how many of them belong on each.
///
/// With a processor for each: if the awaited one is on ours. Else: if more than the
/// share are on ours. One of those leaves, the last that is not awaited, so that they
/// do not all go to the next processor together.
bool is_in_the_way(std::span<const int> cpus, int rank, int blocker, int share);

/// The kernel likes to wake a thread where its waker runs. Ranks that wait for each
/// other so end up on one processor, each in the other's way, with processors to spare
/// or with fewer ranks on them; that lasts, and costs a factor of up to 20 in small
/// calls. Whoever notices goes, but ever less often where that does not help: where
/// other programs use the processors, too, it may help no one.
class Placement {
 public:
  /// For ranks that share `cpus` processors; at least 1.
  Placement(Fabric& fabric, int cpus);

  /// Of a rank that has waited for rank `blocker` for longer than most calls take.
  void look(int blocker);

 private:
  Fabric& fabric_;
  std::vector<int> cpus_;                       // of all ranks, at the last look
  const int share_;                             // ranks on each processor if they are spread evenly
  std::chrono::steady_clock::time_point next_;  // when to look again
  std::chrono::milliseconds pause_;             // from one look to the next
};

}  // namespace dreamcomm
