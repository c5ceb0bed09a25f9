// A group whose ranks are on several hosts: made of the group of this rank's host, and Gloo.
#pragma once

#include <chrono>
#include <functional>
#include <memory>

#include "c10d/fallback.h"
#include "c10d/options.h"
#include "comm/communicator.h"
#include "span/bridge.h"
#include "transport/shm.h"

namespace dreamcomm {

/// Where this rank is in it.
struct Place {
  const Topology& topology;
  int rank;
  int host() const { return topology.host_of(rank); }
  int index() const { return topology.index_of(rank); }
};

/// The group of the ranks of this one's host. Collective among these. `whole` are the options of
/// the meeting that found the hosts. Throws Error.
ShmResult connect_host(const c10::intrusive_ptr<c10d::Store>& store, const Place& place,
                       const ShmOptions& whole);

/// A host's ranks in the job; `members` are the group's, empty: the same.
std::vector<int> members_on_host(const std::vector<int>& members, const Place& place);

/// Tells why a rank gives the group up, where ranks of other hosts learn of it: through the store,
/// if it still answers. They look for a moment, as the rank may have been killed.
std::function<void(const std::string& reason)> tell_reason(
    const c10::intrusive_ptr<c10d::Store>& store, int rank);
std::function<std::string(int rank, std::chrono::milliseconds moment)> told_reason(
    const c10::intrusive_ptr<c10d::Store>& store);

}  // namespace dreamcomm
