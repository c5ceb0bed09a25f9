// Measures the costs that the cost model needs, with these ranks, machine and memory.
#pragma once

#include <chrono>

#include "algorithms/cost/costs.h"
#include "algorithms/primitives.h"
#include "transport/shm/heap.h"

namespace dreamcomm {

/// After this time it measures no further size; larger ones cost as much as the last.
inline constexpr std::chrono::milliseconds kMeasuringTime{250};

struct Measured {
  Costs costs;
  bool complete = false;  // includes copies in heaps at every size
};

/// Collective: all ranks measure together and return the same costs, for each the slowest rank's.
/// `heap` is this rank's, or null if not all ranks have one. Then, or where one is full, copies in
/// heaps cost as much as those through pages. Needs the memory of a few tensors of the largest of
/// Costs::kSizes. Throws what `watch` throws.
Measured measure_costs(Rounds& rounds, Primitives::Scratch& scratch, Heap* heap,
                       WaitObserver& observer);

}  // namespace dreamcomm
