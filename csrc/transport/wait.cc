#include "transport/wait.h"

#include <sched.h>

#include <algorithm>

#include "core/cpus.h"
#include "core/request.h"

namespace dreamcomm {
namespace {

/// Longer than a rank works between two waits, shorter than the slice of another program.
constexpr std::int64_t kLong = 1'000'000;
/// Nanoseconds without yields after a long one: at first, and after many. Checking whether the
/// machine is quiet again then costs less than a hundredth of the time.
constexpr std::int64_t kShortestPause = 16'000'000;
constexpr std::int64_t kLongestPause = 1'000'000'000;
/// Nanoseconds that a quick yield saves: a few of them stand for a sleep and a wake-up.
constexpr std::int64_t kSaved = 10'000;
/// The most that yields may have saved, as credit for yields that cost.
constexpr std::int64_t kMostCredit = 20'000'000;
/// This much saved halves the next pause: some yields are quick on a busy machine, too.
constexpr std::int64_t kForgiven = 256 * kSaved;

}  // namespace

Patience Patience::of(int ranks, bool internode) {
  // An engine between hosts has a thread for each rank, which needs a processor while this rank
  // waits.
  if (internode) return 2 * ranks <= usable_cpus() ? Patience(2000, 20) : Patience(10, 2);
  return ranks <= usable_cpus() ? Patience(2000, 20) : Patience(10, 20);
}

Patience::Means Patience::real_means() { return {sched_yield, now_ns}; }

bool Patience::yield() {
  const std::int64_t begin = means_.now();
  if (begin < resume_ns_.read()) return false;
  means_.yield();
  const std::int64_t end = means_.now();
  if (end - begin >= kLong) {
    long_begin_ns_.set(begin);
    long_end_ns_.set(end);
    return false;
  }
  const std::int64_t credit = credit_ns_.read() + kSaved;
  const std::int64_t pause = pause_ns_.read();
  if (pause == 0 || credit < kForgiven) {
    credit_ns_.set(std::min(credit, kMostCredit));
    return true;
  }
  credit_ns_.set(0);
  pause_ns_.set(pause / 2 < kShortestPause ? 0 : pause / 2);
  return true;
}

void Patience::assess(std::int64_t ready_ns) {
  const std::int64_t end = long_end_ns_.read();
  long_end_ns_.set(0);
  const std::int64_t lost = end - std::max(ready_ns, long_begin_ns_.read());
  if (lost < kLong) return;
  long_yields_.grow(1);
  credit_ns_.grow(-lost);
  if (credit_ns_.read() >= 0) return;
  const std::int64_t longer = std::clamp(2 * pause_ns_.read(), kShortestPause, kLongestPause);
  credit_ns_.set(0);
  pause_ns_.set(longer);
  resume_ns_.set(end + longer);
}

}  // namespace dreamcomm
