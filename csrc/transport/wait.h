// Waits for other ranks: spins, then yields, then sleeps at the doorbell.
#pragma once

#include <chrono>

#include "core/flag.h"

namespace dreamcomm {

/// Called by a thread that has waited a while.
class WaitObserver {
 public:
  virtual ~WaitObserver() = default;
  /// `rank` is one of those waited for, or -1. Throws Error to end the wait: deadline passed, rank
  /// lost, group aborted, Ctrl-C.
  virtual void look(int rank) = 0;
};

/// How long a waiting thread keeps its processor, and whether it offers it to others.
///
/// sched_yield is cheap if only ranks share the processors: the awaited rank runs at once, and
/// yields in its turn. Beside another busy program it is expensive. The kernel treats a yield as
/// the end of the thread's slice, and the other program keeps the processor for all of its own,
/// some 3 ms a yield. A thread that sleeps instead runs as soon as it is woken. So yields are
/// timed. They are left out for a while if those that lasted long beyond what they waited for have
/// cost more than the others saved. Thread-safe: the times are hints.
class Patience {
 public:
  /// How to let another thread run, and how to read the time in nanoseconds.
  struct Means {
    int (*yield)();
    std::int64_t (*now)();
  };
  Patience(int spins, int yields, Means means = real_means())
      : spins_(spins), yields_(yields), means_(means) {}

  static constexpr int kGlance = 100;  // checks that nearly all waits need at most

  /// For `ranks` ranks on the processors of this process: with fewer processors than ranks the
  /// awaited rank may need ours, so do not spin. `internode`: they are one host's ranks of a
  /// multi-node group.
  static Patience of(int ranks, bool internode);

  /// Checks with a pause between; more than kGlance: no other rank needs our processor.
  int spins() const { return spins_; }
  /// Checks with a yield between, at most.
  int yields() const { return yields_; }
  /// Lets another thread run. Returns false if that took long, or would at present: sleep instead.
  bool yield();
  /// Ends a wait for something that has been ready since `ready_ns`; 0: since its beginning, as far
  /// as is known. A long yield that only waited for it does not count against yields.
  void settle(std::int64_t ready_ns = 0) {
    if (long_end_ns_.read() != 0) [[unlikely]]
      assess(ready_ns);
  }
  /// How many yields lasted too long until now.
  std::int64_t long_yields() const { return long_yields_.read(); }
  /// True if yields have cost too much recently, so that some waits do without.
  bool avoids_yields() const { return pause_ns_.read() > 0; }

 private:
  static Means real_means();
  void assess(std::int64_t ready_ns);

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

/// Checks `spins` times; returns whether it was ready.
template <typename Ready>
bool spin_until(int spins, Ready&& ready) {
  for (int i = 0; i < spins; ++i) {
    if (ready()) return true;
    relax();
  }
  return false;
}

/// Longest sleep of a thread that waits for peers before the observer checks again.
inline constexpr std::chrono::milliseconds kSlice{10};

/// Returns when `ready()` is true. `ready` reads flags whose writers ring `doorbell` after they
/// publish. `watch.look(blocker())` is called repeatedly once the wait has lasted a while. The
/// caller settles with `patience` afterwards.
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

/// The same, and settles: since when it was ready is not known.
template <typename Ready, typename Blocker>
void wait_until(Doorbell& doorbell, Patience& patience, WaitObserver& observer, Ready&& ready,
                Blocker&& blocker, std::chrono::nanoseconds slice = kSlice) {
  wait_to_be_settled(doorbell, patience, observer, ready, blocker, slice);
  patience.settle();
}

}  // namespace dreamcomm
