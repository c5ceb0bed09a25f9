// Checks whether a request can be run, before anything is published.
#pragma once

#include "core/request.h"

namespace dreamcomm {

/// Throws Error(kInvalid) naming what is wrong with the request's root, blocks
/// or reduction on this rank.
void validate(const Request& request, int rank, int size);

}  // namespace dreamcomm
