// The parts of calls that end with their opening.
#pragma once

#include <cstddef>

#include "internode/collectives/call_handshake.h"
#include "internode/collectives/hier_context.h"

namespace dreamcomm {

/// Bytes of a call's tensor as a host brings or sends them: if halves widen, those that are added
/// up count as float32.
std::size_t wire_bytes(const Request& request, bool widens);

/// The part of a call that its opening includes: the whole call if the hosts' `leaders` exchange
/// it. `context` and `request` must outlive it.
LeaderPayload opening_part(HierContext& context, const Request& request, bool leaders);

}  // namespace dreamcomm
