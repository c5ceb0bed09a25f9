// Waiting for what other ranks do: spin, then yield, then sleep at the doorbell.
#pragma once

#include <sched.h>

#include <chrono>

#include "core/flag.h"

namespace dreamcomm {

/// Looked at by a thread that has waited a while.
class Watch {
 public:
  virtual ~Watch() = default;
  /// `rank` is one of those waited for, or -1. Throws Error to end the wait:
  /// deadline passed, rank gone, group aborted, Ctrl-C.
  virtual void look(int rank) = 0;
};

/// How long a waiting thread stays on its processor.
struct Patience {
  int spins;   // looks with a pause between; more than kGlance: nobody needs our processor
  int yields;  // looks with sched_yield between

  static constexpr int kGlance = 100;  // looks that nearly all waits need at the most

  /// For `ranks` ranks on the processors of this process: with fewer processors
  /// than ranks the awaited one may need ours, so do not spin. `spans`: they are one host's of
  /// several.
  static Patience of(int ranks, bool spans);
};

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Looks `spins` times; whether it was ready.
template <typename Ready>
bool spin_until(int spins, Ready&& ready) {
  for (int i = 0; i < spins; ++i) {
    if (ready()) return true;
    relax();
  }
  return false;
}

/// Longest sleep of a thread that waits for peers before the watch looks again.
inline constexpr std::chrono::milliseconds kSlice{10};

/// Returns when `ready()` is true. `ready` reads flags whose writers ring
/// `doorbell` after they publish. `watch.look(blocker())` runs now and then
/// once the wait has lasted a while.
///
/// No wake-up is lost: `ready` is evaluated between announcing the sleeper and
/// sleeping, and a writer that published after that evaluation sees the sleeper
/// (see Flag). Even then a sleep ends after `slice`.
template <typename Ready, typename Blocker>
void wait_until(Doorbell& doorbell, const Patience& patience, Watch& watch, Ready&& ready,
                Blocker&& blocker, std::chrono::nanoseconds slice = kSlice) {
  if (spin_until(patience.spins, ready)) return;
  for (int i = 0; i < patience.yields; ++i) {
    if (ready()) return;
    sched_yield();
  }
  while (true) {
    const std::uint32_t seen = doorbell.approach();
    const bool now = ready();
    if (!now) doorbell.sleep(seen, slice);
    doorbell.leave();
    if (now || ready()) return;
    watch.look(blocker());
  }
}

}  // namespace dreamcomm
