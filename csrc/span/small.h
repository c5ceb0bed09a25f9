// The parts of calls that are over with their opening.
#pragma once

#include <cstddef>

#include "span/opening.h"
#include "span/trip.h"

namespace dreamcomm {

/// Bytes of a call's tensor as a host brings or sends them: halves that are added up count as
/// float32.
std::size_t wire_bytes(const Request& request);

/// Whether a call of so many bytes on the wire is over with its opening.
bool ends_with_opening(Kind kind, std::size_t wire_bytes);

/// The part of a call that its opening takes along; of large calls mostly nothing. `trip` and
/// `request` must outlive it.
Small opening_part(Trip& trip, const Request& request);

}  // namespace dreamcomm
