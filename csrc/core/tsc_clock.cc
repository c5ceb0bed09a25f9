#include "core/tsc_clock.h"

#include <cmath>
#include <fstream>
#include <string>

namespace dreamcomm {
namespace {

constexpr double kSteady = 1e-3;      // how much two rates may differ, in parts
constexpr double kInterrupted = 500;  // nanoseconds that reading both clocks may take
constexpr int kTries = 3;

/// True if the kernel has found the counter constant, and equal on all processors.
bool kernel_uses_it() {
#if defined(__x86_64__)
  std::ifstream file("/sys/devices/system/clocksource/clocksource0/current_clocksource");
  std::string name;
  return file >> name && name == "tsc";
#else
  return false;
#endif
}

}  // namespace

TscClock::TscClock() : usable_(kernel_uses_it()) {}

/// Reads the kernel's clock, and anchors the counter to it if no interruption came between.
std::int64_t TscClock::look() {
  std::int64_t now = 0;
  for (int i = 0; i < kTries; ++i) {
    const std::uint64_t before = ticks();
    now = dreamcomm::now_ns();
    if (!usable_) break;
    const std::uint64_t took = ticks() - before;
    const bool at_once = static_cast<double>(took) * rate_ < kInterrupted;
    if (!at_once) continue;
    anchor(before + took / 2, now);
    return last_ns_ = std::max(last_ns_, now);
  }
  trusted_ = 0;
  return last_ns_ = std::max(last_ns_, now);
}

void TscClock::anchor(std::uint64_t ticks, std::int64_t now_ns) {
  const auto ticks_passed = static_cast<std::int64_t>(ticks - anchor_ticks_);
  const std::int64_t passed = now_ns - anchor_ns_;
  if (anchor_ns_ != 0 && ticks_passed > 0 && passed < kWindow / 2) {
    trusted_ = 0;
    return;  // too short for a rate
  }
  const bool fits = anchor_ns_ != 0 && ticks_passed > 0;
  const double rate = fits ? static_cast<double>(passed) / static_cast<double>(ticks_passed) : 0;
  const bool steady = rate > 0 && std::abs(rate - rate_) < kSteady * rate;
  rate_ = rate;
  anchor_ticks_ = ticks;
  anchor_ns_ = now_ns;
  trusted_ = steady ? static_cast<std::uint64_t>(kWindow / rate) : 0;
  scale_ = static_cast<std::uint64_t>(rate * static_cast<double>(std::uint64_t{1} << kShift));
}

}  // namespace dreamcomm
