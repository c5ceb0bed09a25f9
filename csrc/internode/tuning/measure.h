// Measures what messages between hosts cost.
#pragma once

#include <cstddef>
#include <functional>

#include "internode/collectives/hier_context.h"
#include "internode/cost/model.h"

namespace dreamcomm {

/// Messages that each host sends to the next while it receives as many from the one before.
struct Burst {
  int messages = 1;
  std::size_t bytes = 1;  // of each
  bool all = false;       // from each carrier; else from the leader of each host
};

/// What is timed: each is collective, and gives the same seconds on every rank.
struct Trials {
  std::function<double(const Burst& burst)> messages;
  /// Calls of so many bytes that go so; 0 bytes: a barrier.
  std::function<double(std::size_t bytes, const Way& way)> calls;
  /// Since they began; null: no time worth counting.
  std::function<double()> spent{};
};

/// Of ranks that take part: the median of a few rounds, in seconds; of others 0.
double time_of_messages(HierContext& context, const Burst& burst);

/// The costs with which the model predicts what was timed: so they contain what the ranks, and what
/// carries their messages, take from each other. The same on every rank, as the trials are. Once
/// they have taken 2 s, as they may on a link that loses much, hardly more are made than are
/// needed.
WireCosts measure_wire(const Trials& trials, const Shape& shape, const Costs& here);

}  // namespace dreamcomm
