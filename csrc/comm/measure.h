// Measures what the cost model needs, on the machine, ranks and memory at hand.
#pragma once

#include <chrono>

#include "algorithms/costs.h"
#include "algorithms/walk.h"
#include "transport/heap.h"

namespace dreamcomm {

/// Longer than this it measures no further size; larger ones cost as the last.
inline constexpr std::chrono::milliseconds kMeasuringTime{400};

/// Collective: all ranks measure together and return the same costs, for each the
/// slowest rank's. `heap` is this rank's, or null if not all ranks have one; then
/// the motions in heaps cost as much as those through pages. Needs the memory of a
/// few tensors of the largest of Costs::kSizes. Throws what `watch` throws.
Costs measure_costs(Rounds& rounds, Walk::Scratch& scratch, Heap* heap, Watch& watch);

}  // namespace dreamcomm
