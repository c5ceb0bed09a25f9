// The other hosts of a monitored barrier, as seen by the leader that counts its own host's ranks.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/request.h"

namespace dreamcomm {

/// The outcome of a monitored barrier.
struct BarrierOutcome {
  std::uint32_t bits = 0;  // see barrier_flags.h; 0: all are in it
  std::string problem{};   // otherwise a description
};

/// The outcome of counting the ranks of one host.
struct BarrierCount {
  std::uint32_t bits = 0;
  std::vector<int> missing{};       // the group's numbers, the foremost first
  std::vector<std::string> acts{};  // a description of each
  std::string problem{};            // why they could not be counted, or ""
  std::chrono::milliseconds lasted{};
  bool late = false;  // the leader entered after some had stopped waiting
  bool is_complete() const { return missing.empty() && problem.empty(); }
};

/// "Ranks 1, 3 failed to pass monitoredBarrier in 2000 ms (...); rank 1 ...; rank 3 ...", or
/// "monitored_barrier on rank 0 ... came too late; rank 1 has stopped waiting; ...".
std::string describe_missing(const BarrierCount& count, const std::string& who);

/// Only enter() waits longer than a moment, if a host has just been lost. One thread at a time;
/// called in the order of a barrier.
class RemoteBarrier {
 public:
  struct Terms {
    bool all = false;         // name all missing ranks
    std::int64_t issued = 0;  // this rank's collectives so far
    std::chrono::milliseconds timeout{};
    Clock::time_point begin{};
  };

  RemoteBarrier() = default;
  virtual ~RemoteBarrier() = default;
  RemoteBarrier(const RemoteBarrier&) = delete;
  RemoteBarrier& operator=(const RemoteBarrier&) = delete;

  /// Begins a barrier. Returns its outcome if it has ended without this host.
  virtual std::optional<BarrierOutcome> enter(const Terms& terms) = 0;
  /// True if counting should stop: the barrier has ended elsewhere, or a host lacks ranks or has
  /// reached its timeout.
  virtual bool is_over() = 0;
  virtual void report(const BarrierCount& count) = 0;
  /// Describes the ranks that this host, once counted, waits for: "rank 2 of host beta (ranks 2,
  /// 3)".
  virtual std::string awaited() = 0;
  /// Returns the outcome of all hosts, once it is known. `over`: a rank of this host whose timeout
  /// has ended, or -1.
  virtual std::optional<BarrierOutcome> outcome(int over) = 0;
  /// Leaves the barrier, however it ended. `interrupted` is the error that ended it here, or "".
  virtual void leave(const std::string& interrupted) = 0;
};

}  // namespace dreamcomm
