#include "transport/wait.h"

#include <sched.h>

#include <algorithm>

#include "core/cpus.h"
#include "core/request.h"

namespace dreamcomm {
namespace {

/// Longer than a rank works between two waits, shorter than the slice of another program.
constexpr std::int64_t kLong = 1'000'000;
/// Nanoseconds without yields after a long one: at first, and after many of them, so that looking
/// whether the machine is quiet again costs less than a hundredth of the time.
constexpr std::int64_t kShortestPause = 16'000'000;
constexpr std::int64_t kLongestPause = 1'000'000'000;
/// So many quick yields in a row halve the next pause: some are quick on a busy machine, too.
constexpr std::int64_t kManyQuick = 256;

}  // namespace

Patience Patience::of(int ranks, bool spans) {
  // An engine between hosts has a thread for each rank, which needs a processor just when we wait.
  if (spans) return 2 * ranks <= usable_cpus() ? Patience(2000, 20) : Patience(10, 2);
  return ranks <= usable_cpus() ? Patience(2000, 20) : Patience(10, 20);
}

Patience::Means Patience::real_means() { return {sched_yield, now_ns}; }

bool Patience::yield() {
  const std::int64_t begin = means_.now();
  if (begin < resume_ns_.read()) return false;
  means_.yield();
  const std::int64_t end = means_.now();
  const std::int64_t pause = pause_ns_.read();
  if (end - begin >= kLong) {
    const std::int64_t longer = std::clamp(2 * pause, kShortestPause, kLongestPause);
    pause_ns_.set(longer);
    resume_ns_.set(end + longer);
    quick_.set(0);
    long_yields_.grow(1);
    return false;
  }
  if (pause == 0) [[likely]]
    return true;
  quick_.grow(1);
  if (quick_.read() >= kManyQuick) {
    quick_.set(0);
    pause_ns_.set(pause / 2 < kShortestPause ? 0 : pause / 2);
  }
  return true;
}

}  // namespace dreamcomm
