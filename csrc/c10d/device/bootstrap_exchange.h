// How ranks exchange a few bytes when their devices meet: over the memory they share.
#pragma once

#include <chrono>
#include <functional>

#include "comm/communicator.h"
#include "gpu/host/communicator.h"
#include "internode/hier_communicator.h"

namespace dreamcomm {

/// Asked anew for each wait, as the group's timeout may change.
using LongestWait = std::function<std::chrono::milliseconds()>;

/// Among all ranks, in the order of the group's collectives.
gpu::Exchange exchange_among_all(Communicator& comm, const LongestWait& longest,
                                 const Interrupt& interrupt);

/// Among the ranks of all hosts, likewise.
gpu::Exchange exchange_among_hosts(Communicator& host, HierarchicalCommunicator& hier,
                                   const LongestWait& longest, const Interrupt& interrupt);

/// Between this rank and another, beside all else: first the bytes of `first`, then of the
/// other one. `first` is one of the two.
gpu::Exchange exchange_with(Communicator& comm, int peer, int first, const LongestWait& longest,
                            const Interrupt& interrupt);

}  // namespace dreamcomm
