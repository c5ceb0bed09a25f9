// What holds as long as a rank is inside a call.
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
class Passing {
 public:
  Passing(Turnstile& turnstile, Turnstile::Turn turn, Member& member)
      : turnstile_(turnstile), turn_(turn), member_(member) {}
  ~Passing() {
    turnstile_.pass(turn_);
    member_.ring_own();
  }
  Passing(const Passing&) = delete;
  Passing& operator=(const Passing&) = delete;

 private:
  Turnstile& turnstile_;
  Turnstile::Turn turn_;
  Member& member_;
};

/// Shows peers and tools that the rank is inside a call.
class Entered {
 public:
  Entered(Progress& progress, Kind kind, std::size_t bytes, std::int64_t sequence,
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
  ~Entered() {
    if (std::uncaught_exceptions() > before_) progress_.failed_in.set(progress_.sequence.read());
    progress_.inside.set(0);
    progress_.waiting_for.set(-1);
  }
  Entered(const Entered&) = delete;
  Entered& operator=(const Entered&) = delete;

 private:
  Progress& progress_;
  const int before_ = std::uncaught_exceptions();
};

/// While a rank waits for ranks of other hosts. It stays so if that fails: it is not to blame until
/// it has said why.
class Away {
 public:
  explicit Away(Progress& progress) : progress_(progress) { progress_.away.set(1); }
  ~Away() {
    if (std::uncaught_exceptions() > before_) return;
    progress_.away.set(0);
    progress_.waiting_for.set(-1);
  }
  Away(const Away&) = delete;
  Away& operator=(const Away&) = delete;

 private:
  Progress& progress_;
  const int before_ = std::uncaught_exceptions();
};

}  // namespace dreamcomm
