// Waiting for what other ranks do: spin, then yield, then sleep at the doorbell.
#pragma once

#include <chrono>

#include "core/flag.h"

namespace dreamcomm {

/// Looked at by a thread that has waited a while.
class WaitObserver {
 public:
  virtual ~WaitObserver() = default;
  /// `rank` is one of those waited for, or -1. Throws Error to end the wait:
  /// deadline passed, rank gone, group aborted, Ctrl-C.
  virtual void look(int rank) = 0;
};

/// How long a waiting thread stays on its processor, and whether it offers that to others.
///
/// sched_yield is cheap where only ranks share the processors: the awaited one runs at once, and
/// yields in its turn. Beside another busy program it is not: the kernel takes a yield as the end
/// of the thread's slice, and the other program keeps the processor for all of its own, some 3 ms
/// a yield. A thread that sleeps instead is run as soon as it is woken. So yields are timed, and
/// left out for a while where those that lasted long beyond what they waited for have cost more
/// than the others saved. Thread-safe: the times are hints.
class Patience {
 public:
  /// How to let another thread run, and what time it is, in nanoseconds.
  struct Means {
    int (*yield)();
    std::int64_t (*now)();
  };
  Patience(int spins, int yields, Means means = real_means())
      : spins_(spins), yields_(yields), means_(means) {}

  static constexpr int kGlance = 100;  // looks that nearly all waits need at the most

  /// For `ranks` ranks on the processors of this process: with fewer processors
  /// than ranks the awaited one may need ours, so do not spin. `spans`: they are one host's of
  /// several.
  static Patience of(int ranks, bool internode);

  /// Looks with a pause between; more than kGlance: no other rank needs our processor.
  int spins() const { return spins_; }
  /// Looks with a yield between, at the most.
  int yields() const { return yields_; }
  /// Lets another thread run; false where that took long, or would at present: sleep instead.
  bool yield();
  /// Ends a wait for what has been there since `ready_ns`; 0: all the time, as far as is known. A
  /// long yield that only waited for it is not held against yields.
  void settle(std::int64_t ready_ns = 0) {
    if (long_end_ns_.read() != 0) [[unlikely]]
      judge(ready_ns);
  }
  /// So many lasted too long until now.
  std::int64_t long_yields() const { return long_yields_.read(); }
  /// Whether they have cost too much of late, so that some waits go without.
  bool avoids_yields() const { return pause_ns_.read() > 0; }

 private:
  static Means real_means();
  void judge(std::int64_t ready_ns);

  int spins_;
  int yields_;
  Means means_;
  Gauge resume_ns_;  // no yield before this time
  Gauge pause_ns_;   // from the last that lasted too long until then; 0: yields go on
  Gauge credit_ns_;  // what yields have saved since then, less what they have cost
  Gauge long_yields_;
  Gauge long_begin_ns_;  // of a long yield of the wait under way
  Gauge long_end_ns_;    // 0: there was none
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
/// once the wait has lasted a while. The caller settles with `patience` afterwards.
///
/// No wake-up is lost: `ready` is evaluated between announcing the sleeper and
/// sleeping, and a writer that published after that evaluation sees the sleeper
/// (see Flag). Even then a sleep ends after `slice`.
template <typename Ready, typename Blocker>
void wait_to_be_settled(Doorbell& doorbell, Patience& patience, WaitObserver& observer,
                        Ready&& ready, Blocker&& blocker, std::chrono::nanoseconds slice = kSlice) {
  if (spin_until(patience.spins(), ready)) return;
  for (int i = 0; i < patience.yields(); ++i) {
    if (ready()) return;
    if (!patience.yield()) break;
  }
  while (true) {
    const std::uint32_t seen = doorbell.approach();
    const bool now = ready();
    if (!now) doorbell.sleep(seen, slice);
    doorbell.leave();
    if (now || ready()) return;
    observer.look(blocker());
  }
}

/// The same; settles: since when it was ready is not known.
template <typename Ready, typename Blocker>
void wait_until(Doorbell& doorbell, Patience& patience, WaitObserver& observer, Ready&& ready,
                Blocker&& blocker, std::chrono::nanoseconds slice = kSlice) {
  wait_to_be_settled(doorbell, patience, observer, ready, blocker, slice);
  patience.settle();
}

}  // namespace dreamcomm
