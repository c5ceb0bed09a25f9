// The parts of a group on several nodes: the group of this rank's host, its recorder, its reasons.
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

/// The group of this host's ranks. Collective among these. `options` are those of the bootstrap
/// that found the hosts, and `whole` is its result. Throws Error.
ShmResult connect_host(const c10::intrusive_ptr<c10d::Store>& store, const Place& place,
                       const ShmOptions& options, const ShmResult& whole);

/// The recorder of the whole group; `parts` is that of its part on this host.
std::shared_ptr<Recorder> recorder_of_hosts(const std::shared_ptr<Recorder>& parts,
                                            const Place& place, const std::vector<int>& members);

/// For each host a line on its ranks, with their local indices, and why they share no memory with
/// others; `apart` gives each rank's reason.
std::string map_of_hosts(const Topology& topology, const std::vector<std::string>& apart);

/// A host's ranks in the job; `members` are the group's, empty: the same.
std::vector<int> members_on_host(const std::vector<int>& members, const Place& place);

/// Posts and reads in the store, if it still answers, why ranks abort the group. Reading waits for
/// a moment, as the other rank may have been killed. A post also publishes known ends on this host.
AbortReasons reasons_through(const std::shared_ptr<StoreWorker>& worker);

}  // namespace dreamcomm
