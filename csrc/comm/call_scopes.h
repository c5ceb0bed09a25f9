// Scopes of a call: each holds as long as its object lives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>

#include "comm/rank_state.h"
#include "comm/ticket_lock.h"
#include "core/cpus.h"
#include "core/request.h"
#include "core/types.h"

namespace dreamcomm {

/// Ends a turn when it goes out of scope.
class TurnScope {
 public:
  TurnScope(TicketLock& ticket_lock, TicketLock::Turn turn, RankState& state)
      : ticket_lock_(ticket_lock), turn_(turn), state_(state) {}
  // INVARIANT: no waiter for the next turn is left asleep. It takes its number before it looks
  // whose turn it is, and the turn is passed before the numbers are read here: one sees the other.
  // Others do not wait for a turn's end, and waking them would cost as much as a small call: the
  // progress thread sleeps at the same bell for the rest of the group's life.
  ~TurnScope() {
    ticket_lock_.pass(turn_);
    if (!ticket_lock_.idle()) state_.ring_own();
  }
  TurnScope(const TurnScope&) = delete;
  TurnScope& operator=(const TurnScope&) = delete;

 private:
  TicketLock& ticket_lock_;
  TicketLock::Turn turn_;
  RankState& state_;
};

/// Shows peers and tools that the rank is inside a call.
class InCallScope {
 public:
  InCallScope(Progress& progress, Kind kind, std::size_t bytes, std::int64_t sequence,
              Clock::time_point now)
      : progress_(progress) {
    progress_.before.set(progress_.kind.read());
    progress_.sequence.set(sequence);
    progress_.kind.set(static_cast<std::int64_t>(kind));
    progress_.bytes.set(static_cast<std::int64_t>(bytes));
    progress_.entered_ns.set(to_ns(now));
    progress_.cpu.set(current_cpu());
    progress_.inside.set(1);
  }
  ~InCallScope() {
    if (std::uncaught_exceptions() > before_) progress_.failed_in.set(progress_.sequence.read());
    progress_.inside.set(0);
    progress_.waiting_for.set(-1);
  }
  InCallScope(const InCallScope&) = delete;
  InCallScope& operator=(const InCallScope&) = delete;

 private:
  Progress& progress_;
  const int before_ = std::uncaught_exceptions();
};

/// Marks that a rank waits for ranks of other hosts. The mark stays if that fails: the rank is not
/// the cause until it has reported why.
class InternodeWaitScope {
 public:
  explicit InternodeWaitScope(Progress& progress) : progress_(progress) { progress_.away.set(1); }
  ~InternodeWaitScope() {
    if (std::uncaught_exceptions() > before_) return;
    progress_.away.set(0);
    progress_.waiting_for.set(-1);
  }
  InternodeWaitScope(const InternodeWaitScope&) = delete;
  InternodeWaitScope& operator=(const InternodeWaitScope&) = delete;

 private:
  Progress& progress_;
  const int before_ = std::uncaught_exceptions();
};

}  // namespace dreamcomm
