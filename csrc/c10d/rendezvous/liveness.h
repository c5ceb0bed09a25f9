// What its default group knows of a job's ranks: who has ended, and what groups they make. torch
// tells the members of other groups by their ranks in it.
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

/// The kernel tells of the ranks of this host. Of another host's its ranks tell, once they know,
/// through the store.
class Liveness {
 public:
  /// All ranks share memory. `clerk` is of a store that all ranks write to.
  Liveness(std::shared_ptr<Communicator> all, std::shared_ptr<StoreWorker> worker);
  /// `host` is of the ranks of this one's host.
  Liveness(std::shared_ptr<Communicator> host, Topology topology, int rank,
           std::shared_ptr<StoreWorker> worker);

  /// Whether the process of a rank is known to have ended. Bounded. Any thread.
  bool has_ended(int rank);
  /// Of those who have ended on this host, the other hosts. Bounded. Any thread.
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
  std::set<int> told_;  // to the others, or by them
  GroupOrder group_order_;
};

/// The process's. From now on, as long as it lives.
void set_liveness(const std::shared_ptr<Liveness>& one);
/// The one that was set last, if it lives and this process set it, or null.
std::shared_ptr<Liveness> liveness();

}  // namespace dreamcomm
