// The monitored barrier: rank 0 calls the roll and says who is missing.
//
// It uses flags of its own, so a failed one leaves the collectives' order intact.
//   present    of each rank: advances when it enters a roll call and when it leaves, so
//              2n + 1 says: in its roll call n (from 0)
//   roll_calls of each rank: the collectives it had issued when it left roll call n, at n % 8
//              (of rank 0 before its verdict)
//   passed     of rank 0: n + 1 when all were in roll call n, before its verdict
//   verdict    of rank 0: (n + 1) << 2 when it has ended roll call n; the lowest bits
//              say what was wrong, the text beside it, at n % 2, in words
// Rank 0 alone judges who is missing: a rank that gave up by itself would be missing, too.
// INVARIANT: the next one cannot pass before all have left this one, so a rank that is slow to
// look finds `passed` as it was; a text is written anew after the next verdict only, and of a
// verdict that another has replaced such a rank says no more than that.
// INVARIANT: roll call n of rank 0 passes only if every rank is in its own roll call n then. So
// one that comes late to a failed one does not pass for the next; it is told. A rank that has left
// some out goes on to the present one: it has issued more collectives since than those who held
// it, and one that is late has not.
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
    bool all = false;                 // of the missing are to be named
    std::int64_t issued = 0;          // collectives so far, on this rank
    RemoteBarrier* remote = nullptr;  // of rank 0, where the group has other hosts
  };

  explicit MonitoredBarrier(RankState& state);

  /// Returns when all ranks are in it. Throws Error(kTimeout) on every rank that is, naming the
  /// missing: the first, or `all` of them; Error(kPeerLost), and soon, where one cannot come. Of
  /// the timeouts of those who are in it the first that ends, ends it for all.
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
  /// Takes what it waits off the timeout.
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
  void await_caller(std::uint32_t number, const Round& round);
  void await_verdict(std::uint32_t number, const Round& round);
  bool all_present() const;
  bool is_time_over(int rank) const;
  int ender() const;
  bool is_present(int rank) const;
  bool has_aborted(int rank) const;
  bool some_have_aborted() const;
  int awaited() const;
  int gone() const;
  bool lacks_the_gone() const;
  int foremost(const std::vector<int>& absent) const;
  int awaited_beside_rank_0() const;
  void heed_verdict(std::uint32_t number, bool late) const;
  BarrierCount missing(std::chrono::milliseconds waited, bool all) const;
  void give_verdict(const Outcome& found, const Terms& terms);

  RankState& state_;
  std::mutex mutex_;  // one thread of the rank at a time
};

}  // namespace dreamcomm
