// The clock that all processes of a host share, read from the processor's counter. The kernel's
// function takes 25 ns, which small calls feel; the counter takes 10.
//
// INVARIANT: a returned time is off by tens of nanoseconds, at most by two microseconds. The
// kernel's clock is read again after each millisecond, and whenever the counter has jumped (a
// suspended machine). The counter is not used before two rates in a row have agreed. No returned
// time is before an earlier one.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/request.h"

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace dreamcomm {

class TscClock {
 public:
  /// Uses the counter if the kernel does: then it is the same on all processors.
  TscClock();

  /// As Clock::now(). One thread at a time.
  Clock::time_point now() { return Clock::time_point(std::chrono::nanoseconds(now_ns())); }
  std::int64_t now_ns() {
    const std::uint64_t since = ticks() - anchor_ticks_;
    if (since < trusted_) [[likely]] {
      const auto passed = static_cast<std::int64_t>(since * scale_ >> kShift);
      return last_ns_ = std::max(last_ns_, anchor_ns_ + passed);
    }
    return look();
  }

 private:
  static constexpr std::int64_t kWindow = 1'000'000;  // nanoseconds
  static constexpr unsigned kShift = 32;

  static std::uint64_t ticks() {
#if defined(__x86_64__)
    return __rdtsc();
#else
    return 0;
#endif
  }
  std::int64_t look();
  void anchor(std::uint64_t ticks, std::int64_t now_ns);

  const bool usable_;
  std::uint64_t trusted_ = 0;  // ticks from the anchor on
  std::uint64_t scale_ = 0;    // nanoseconds of 2^kShift ticks
  std::uint64_t anchor_ticks_ = 0;
  std::int64_t anchor_ns_ = 0;
  std::int64_t last_ns_ = 0;
  double rate_ = 0;  // nanoseconds of a tick, between the last two anchors; 0: not known
};

}  // namespace dreamcomm
