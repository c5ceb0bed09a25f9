// How ranks exchange a few bytes when their devices meet: over the memory they share.
#pragma once

#include <chrono>

#include "comm/communicator.h"
#include "gpu/group.h"
#include "span/bridge.h"

namespace dreamcomm {

/// Among all ranks, in the order of the group's collectives.
gpu::Exchange exchange_among_all(Communicator& comm, std::chrono::milliseconds longest,
                                 const Interrupt& interrupt);

/// Among the ranks of all hosts, likewise.
gpu::Exchange exchange_among_hosts(Communicator& host, Bridge& bridge,
                                   std::chrono::milliseconds longest, const Interrupt& interrupt);

/// Between this rank and another, beside all else: first the bytes of `first`, then of the
/// other one. `first` is one of the two.
gpu::Exchange exchange_with(Communicator& comm, int peer, int first,
                            std::chrono::milliseconds longest, const Interrupt& interrupt);

}  // namespace dreamcomm
