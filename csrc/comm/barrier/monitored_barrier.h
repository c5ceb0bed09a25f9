// The monitored barrier: rank 0 determines which ranks are missing, and reports them.
//
// It uses flags of its own, so a failed barrier leaves the collectives' order intact.
//   present             of each rank: advances when it enters a barrier and when it leaves,
//                       so 2n + 1 means: in its barrier n (from 0)
//   monitored_barriers  of each rank: the collectives it had issued when it left barrier n, at
//                       n % 8 (rank 0 writes it before its verdict)
//   passed              of rank 0: n + 1 when all were in barrier n, before its verdict
//   verdict             of rank 0: (n + 1) << 3 when it has ended barrier n; the lowest
//                       bits say what was wrong, and the text beside it, at n % 2, describes it
// Only rank 0 decides which ranks are missing: a rank that stopped waiting by itself would be
// missing, too.
// INVARIANT: the next barrier cannot pass before all ranks have left this one, so a slow rank still
// finds `passed` unchanged. A text is overwritten only after the next verdict. If a verdict has
// been replaced by another, a slow rank reports only that.
// INVARIANT: barrier n of rank 0 passes only if every rank is in its own barrier n then. So a rank
// that enters a failed barrier late does not count for the next one; it gets an error. A rank that
// has left some out advances to the present one: it has issued more collectives since than the
// ranks that held it. A late rank has not.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/barrier/remote_barrier.h"
#include "comm/rank_state.h"
#include "comm/wait_watchdog.h"

namespace dreamcomm {

class MonitoredBarrier {
 public:
  struct Terms {
    std::chrono::milliseconds timeout{};
    bool all = false;                 // name all missing ranks
    std::int64_t issued = 0;          // this rank's collectives so far
    RemoteBarrier* remote = nullptr;  // rank 0's, if the group has other hosts
  };

  explicit MonitoredBarrier(RankState& state);

  /// Returns when all ranks are in it. Otherwise throws on every rank that is in it:
  /// Error(kTimeout), which names the first missing rank or `all` of them; or Error(kPeerLost),
  /// without waiting for the timeout, if a rank cannot enter. The first timeout that ends, of the
  /// ranks in it, ends it for all.
  void hold(const Terms& terms, const std::function<void()>& idle,
            const std::function<void()>& interrupt);

 private:
  using Outcome = BarrierOutcome;
  struct Round {
    const Terms& terms;
    const std::function<void()>& idle;
    const std::function<void()>& interrupt;
    Clock::time_point begin;
    Clock::time_point deadline;
  };
  /// Subtracts the time it waits from the timeout.
  std::unique_lock<std::mutex> take_turn(Terms& terms, const std::function<void()>& idle,
                                         const std::function<void()>& interrupt);
  void catch_up(std::int64_t issued);
  std::optional<std::int64_t> calls_beyond(std::uint32_t number, std::int64_t issued) const;
  void watch(const Round& round, const std::function<bool()>& ready,
             const std::function<int()>& blocker);
  void watch_others(const Round& round, const std::function<bool()>& ready, bool complete);
  void watch(WaitWatchdog& watchdog, const std::function<bool()>& ready,
             const std::function<int()>& blocker);
  void await_rest(const Round& round);
  BarrierCount count(const Round& round);
  Outcome count_all(const Round& round);
  int time_over(const Round& round) const;
  void call(const Round& round);
  void answer(const Round& round);
  void await_rank_0(std::uint32_t number, const Round& round);
  void await_verdict(std::uint32_t number, const Round& round);
  bool all_present() const;
  bool is_time_over(int rank) const;
  int ender() const;
  bool is_present(int rank) const;
  bool has_aborted(int rank) const;
  bool some_have_aborted() const;
  int awaited() const;
  int gone() const;
  int foremost(const std::vector<int>& absent) const;
  int awaited_beside_rank_0() const;
  void apply_verdict(std::uint32_t number, bool late) const;
  BarrierCount missing(std::chrono::milliseconds waited, bool all) const;
  void publish_verdict(const Outcome& found, const Terms& terms);

  RankState& state_;
  std::mutex mutex_;  // one thread of the rank at a time
};

}  // namespace dreamcomm
