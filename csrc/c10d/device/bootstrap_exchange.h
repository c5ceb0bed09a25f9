// How ranks exchange a few bytes to bootstrap their devices: by calls on CPU tensors.
#pragma once

#include <chrono>
#include <functional>

#include "comm/communicator.h"
#include "comm/group_communicator.h"
#include "gpu/host/communicator.h"

namespace dreamcomm {

/// Called for each wait, as the group's timeout may change.
using LongestWait = std::function<std::chrono::milliseconds()>;

/// Among all ranks of the group, in the order of its collectives.
gpu::Exchange exchange_among_all(GroupCommunicator& group, const LongestWait& longest,
                                 const Interrupt& interrupt);

/// Between this rank and another, outside any order: first the bytes of `first`, then of the
/// other one. `first` is one of the two.
gpu::Exchange exchange_with(Communicator& comm, int peer, int first, const LongestWait& longest,
                            const Interrupt& interrupt);

}  // namespace dreamcomm
