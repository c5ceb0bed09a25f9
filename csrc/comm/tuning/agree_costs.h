// How the ranks of a group agree on the costs that algorithms are chosen by.
#pragma once

#include <functional>
#include <optional>

#include "comm/rank_state.h"
#include "comm/tuning/measure.h"

namespace dreamcomm {

/// The conditions of an agreement's waits.
struct TuningWaits {
  Clock::time_point deadline;
  const std::function<void()>& idle;       // as WaitWatchdog has it
  const std::function<void()>& interrupt;  // likewise
};

/// Collective: rank 0 shares the costs it knows; if it knows none, all measure them. Throws Error,
/// after which the group is unusable.
Measured agree_on_costs(RankState& state, Rounds& rounds, Primitives::Scratch& scratch,
                        const std::optional<Costs>& known, Heap* heap, const TuningWaits& waits);

}  // namespace dreamcomm
