// A group whose ranks are on several hosts: made of the group of this rank's host, and Gloo.
#pragma once

#include <memory>
#include <vector>

#include "c10d/base/options.h"
#include "c10d/base/torch_fallback.h"
#include "c10d/rendezvous/store_worker.h"
#include "comm/communicator.h"
#include "comm/record/recorder.h"
#include "internode/hier_communicator.h"
#include "internode/liveness/abort_reasons.h"
#include "transport/bootstrap/connect_shm.h"

namespace dreamcomm {

/// Where this rank is in it.
struct Place {
  const Topology& topology;
  int rank;
  int host() const { return topology.host_of(rank); }
  int index() const { return topology.index_of(rank); }
};

/// The group of the ranks of this one's host. Collective among these. `options` are those of the
/// meeting that found the hosts, and `whole` came of it. Throws Error.
ShmResult connect_host(const c10::intrusive_ptr<c10d::Store>& store, const Place& place,
                       const ShmOptions& options, const ShmResult& whole);

/// Of the whole group, whose part on this host is `parts`.
std::shared_ptr<Recorder> recorder_of_hosts(const std::shared_ptr<Recorder>& parts,
                                            const Place& place, const std::vector<int>& members);

/// For each host a line on its ranks, with their local indices, and why they share no memory with
/// others; `apart` is what ranks have found of that.
std::string map_of_hosts(const Topology& topology, const std::vector<std::string>& apart);

/// A host's ranks in the job; `members` are the group's, empty: the same.
std::vector<int> members_on_host(const std::vector<int>& members, const Place& place);

/// How a rank tells, and learns, why ranks of other hosts abort the group, or have ended: through
/// the store, if it still answers. They look for a moment, as the rank may have been killed. What
/// is known of ends on this host is told with it.
AbortReasons reasons_through(const std::shared_ptr<StoreWorker>& worker);

}  // namespace dreamcomm
