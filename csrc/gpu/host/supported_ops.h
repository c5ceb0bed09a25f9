// The reductions that GPUs compute here, and those that they compute as another one with the same
// bits.
#pragma once

#include <optional>

#include "core/types.h"

namespace dreamcomm::gpu {

/// The reduction that kernels carry out for `wanted`, or nothing where there is none.
///
///   wanted                                  carried out
///   SUM, AVG, PRODUCT, MIN, MAX of a type   the same
///     that kernels know (formats.h)
///   bool: SUM and BOR; PRODUCT and BAND;    uint8: MAX; MIN;
///     MIN; MAX                                MIN; MAX
///   complex: SUM, AVG                       the same of its real numbers
///   uint16, uint32, uint64: SUM, PRODUCT    the same of the signed type, modulo 2^bits
std::optional<Reduction> computed_as(const Reduction& wanted);

}  // namespace dreamcomm::gpu
