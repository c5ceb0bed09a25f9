// How the ranks of a group agree on the costs that algorithms are chosen by.
#pragma once

#include <functional>
#include <optional>

#include "comm/rank_state.h"
#include "comm/tuning/measure.h"

namespace dreamcomm {

/// What the waits of an agreement go by.
struct TuningWaits {
  Clock::time_point deadline;
  const std::function<void()>& idle;       // as Guard has it
  const std::function<void()>& interrupt;  // likewise
};

/// Collective: rank 0 tells which costs it knows; if none, all measure them. Throws
/// Error, after which the group is unusable.
Measured agree_on_costs(RankState& state, Rounds& rounds, Primitives::Scratch& scratch,
                        const std::optional<Costs>& known, Heap* heap, const TuningWaits& waits);

}  // namespace dreamcomm
