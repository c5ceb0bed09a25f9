// A roll call of a group on several hosts, as who calls the roll of one host sees the others.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/request.h"

namespace dreamcomm {

/// What a roll call has come to.
struct BarrierOutcome {
  std::uint32_t bits = 0;  // see barrier_flags.h; 0: all are in it
  std::string problem{};   // else, in words
};

/// What counting the ranks of one host has come to.
struct BarrierCount {
  std::uint32_t bits = 0;
  std::vector<int> missing{};       // as the group numbers them, the foremost first
  std::vector<std::string> acts{};  // of each, what is known of it, in words
  std::string problem{};            // else why it could not be counted
  std::chrono::milliseconds lasted{};
  bool late = false;  // who calls the roll came when some had stopped waiting
  bool is_complete() const { return missing.empty() && problem.empty(); }
};

/// "Ranks 1, 3 failed to pass monitoredBarrier in 2000 ms (...); rank 1 ...; rank 3 ...", or
/// "monitored_barrier on rank 0 ... came too late; rank 1 has stopped waiting; ...".
std::string words_on_missing(const BarrierCount& count, const std::string& who);

/// All but enter() wait no longer than for a moment, where a host has just gone. One thread at a
/// time; in the order of a roll call.
class RemoteBarrier {
 public:
  struct Terms {
    bool all = false;         // of the missing are to be named
    std::int64_t issued = 0;  // collectives so far, on this rank
    std::chrono::milliseconds timeout{};
    Clock::time_point begin{};
  };

  RemoteBarrier() = default;
  virtual ~RemoteBarrier() = default;
  RemoteBarrier(const RemoteBarrier&) = delete;
  RemoteBarrier& operator=(const RemoteBarrier&) = delete;

  /// This host's roll is called. Returns what the others' came to, where that has ended without
  /// this host.
  virtual std::optional<BarrierOutcome> enter(const Terms& terms) = 0;
  /// Whether to count no longer: it has ended elsewhere, or somebody wants to know who is missing.
  virtual bool is_over() = 0;
  virtual void report(const BarrierCount& count) = 0;
  /// Whom this host, which is counted, waits for: "rank 2 of host beta (ranks 2, 3)".
  virtual std::string awaited() = 0;
  /// What all hosts have come to, once that is known. `over`: a rank of this host whose timeout has
  /// ended, or -1.
  virtual std::optional<BarrierOutcome> outcome(int over) = 0;
  /// However it ended; `interrupted` in words, or "".
  virtual void leave(const std::string& interrupted) = 0;
};

}  // namespace dreamcomm
