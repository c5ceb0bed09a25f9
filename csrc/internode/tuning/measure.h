// Measures the costs of messages between hosts.
#pragma once

#include <cstddef>
#include <functional>

#include "internode/collectives/hier_context.h"
#include "internode/cost/model.h"

namespace dreamcomm {

/// Messages that each host sends to the next while it receives as many from the one before.
struct Burst {
  int messages = 1;
  std::size_t bytes = 1;  // of each message
  bool all = false;       // from each carrier; otherwise from the leader of each host
};

/// The timed calls: each is collective, and gives the same seconds on every rank.
struct Trials {
  std::function<double(const Burst& burst)> messages;
  /// Times calls of so many bytes that run this way; 0 bytes: a barrier.
  std::function<double(std::size_t bytes, const Way& way)> calls;
  /// Seconds since the trials began; null: no time worth counting.
  std::function<double()> spent{};
};

/// For ranks that take part: the median of a few rounds, in seconds; for others 0.
double time_of_messages(HierContext& context, const Burst& burst);

/// Returns the costs with which the model predicts the measured times. So they include the time
/// that the ranks, and the threads that carry their messages, take from each other. They are the
/// same on every rank, as the trials are. Once the trials have taken 2 s, as they may on a link
/// that loses much, hardly more are made than needed.
WireCosts measure_wire(const Trials& trials, const Shape& shape, const Costs& here);

}  // namespace dreamcomm
