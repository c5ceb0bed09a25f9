// The flags by which the ranks of a monitored barrier see each other; see monitored_barrier.h.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "comm/barrier/monitored_barrier.h"
#include "comm/rank_state.h"

namespace dreamcomm::barrier {

// The lowest bits of a verdict:
inline constexpr std::uint32_t kLate = 1;    // a rank has not entered
inline constexpr std::uint32_t kEnded = 2;   // and will not, or rank 0 aborted the barrier
inline constexpr std::uint32_t kMissed = 4;  // it had ended without this host, as the text says
inline constexpr std::uint32_t kBits = kLate | kEnded | kMissed;
inline constexpr std::uint32_t kOne = kBits + 1;  // the step of a verdict's number

/// Time beyond the deadline for rank 0's verdict.
inline constexpr std::chrono::seconds kGrace{10};
inline constexpr std::chrono::milliseconds kStopped{1000};

inline Flag& present(const RankState& state, int rank) {
  return state.fabric().header(rank).present;
}

/// The end of `timeout` from now, on the clock of now_ns().
inline std::int64_t ends_ns(std::chrono::milliseconds timeout) {
  constexpr std::chrono::hours kLong(24 * 365 * 100);
  return now_ns() +
         std::chrono::nanoseconds(std::min<std::chrono::milliseconds>(timeout, kLong)).count();
}

/// How many barriers a rank has left.
inline std::uint32_t ended(const Flag& present) { return present.read() / 2; }

/// The collectives that the rank had issued when it left barrier `number`.
inline Gauge& calls_at(Header& header, std::uint32_t number) {
  return header.monitored_barriers[number % header.monitored_barriers.size()];
}

/// The value of rank 0's verdict once barrier `number` has ended.
inline std::uint32_t verdict_on(std::uint32_t number) { return (number + 1) * kOne; }

/// Keeps the rank's `present` odd while the object lives.
class Presence {
 public:
  Presence(RankState& state, const MonitoredBarrier::Terms& terms)
      : header_(state.header()), terms_(terms) {
    header_.barrier_ends_ns.set(ends_ns(terms.timeout));
    header_.barrier_began_ns.set(now_ns());
    if (header_.progress.inside.read() == 0) header_.progress.waiting_for.set(-1);
    header_.present.take();
    state.ring_peers();
  }
  ~Presence() {
    calls_at(header_, ended(header_.present)).set(terms_.issued);  // rank 0 already has
    header_.present.take();
  }
  Presence(const Presence&) = delete;
  Presence& operator=(const Presence&) = delete;

 private:
  Header& header_;
  const MonitoredBarrier::Terms& terms_;
};

}  // namespace dreamcomm::barrier
