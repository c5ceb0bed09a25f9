// The default group's knowledge of a job's ranks: those that have ended, and the groups that they
// make. torch numbers the members of other groups by their ranks in it.
#pragma once

#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "c10d/rendezvous/group_order.h"
#include "c10d/rendezvous/store_worker.h"
#include "comm/communicator.h"
#include "transport/topology.h"

namespace dreamcomm {

/// The kernel reports the ends of this host's ranks. Another node's ranks post the ends they know
/// of in the store.
class Liveness {
 public:
  /// All ranks share memory. `worker` uses a store that all ranks write to.
  Liveness(std::shared_ptr<Communicator> all, std::shared_ptr<StoreWorker> worker);
  /// `host` is the communicator of this host's ranks.
  Liveness(std::shared_ptr<Communicator> host, Topology topology, int rank,
           std::shared_ptr<StoreWorker> worker);

  /// True if the process of a rank is known to have ended. Bounded. Any thread.
  bool has_ended(int rank);
  /// Posts the ends of this host's ranks for the other nodes. Bounded. Any thread.
  void tell_of_host();
  GroupOrder& group_order() { return group_order_; }

 private:
  bool has_ended_here(int rank) const;
  void tell(int rank);

  const std::shared_ptr<Communicator> host_;
  const Topology topology_;  // of no ranks: all are on one host
  const int rank_;
  const std::shared_ptr<StoreWorker> worker_;
  std::mutex mutex_;
  std::set<int> told_;  // ranks whose end was posted, by this rank or another
  GroupOrder group_order_;
};

/// The process's. From now on, as long as it lives.
void set_liveness(const std::shared_ptr<Liveness>& one);
/// The last one set, if it lives and this process set it, or null.
std::shared_ptr<Liveness> liveness();

}  // namespace dreamcomm
