// Measures what the cost model needs, on the machine, ranks and memory at hand.
#pragma once

#include <chrono>

#include "algorithms/cost/costs.h"
#include "algorithms/primitives.h"
#include "transport/shm/heap.h"

namespace dreamcomm {

/// Longer than this it measures no further size; larger ones cost as the last.
inline constexpr std::chrono::milliseconds kMeasuringTime{250};

struct Measured {
  Costs costs;
  bool complete = false;  // motions in heaps, too, at every size
};

/// Collective: all ranks measure together and return the same costs, for each the
/// slowest rank's. `heap` is this rank's, or null if not all ranks have one. Then, or
/// where one is full, the motions in heaps cost as much as those through pages. Needs the memory of
/// a few tensors of the largest of Costs::kSizes. Throws what `watch` throws.
Measured measure_costs(Rounds& rounds, Primitives::Scratch& scratch, Heap* heap,
                       WaitObserver& observer);

}  // namespace dreamcomm
