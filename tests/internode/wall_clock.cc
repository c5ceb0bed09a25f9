// Loaded before the C library: a process whose wall clock is WALL_CLOCK_SHIFT seconds ahead.
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include <cstdlib>

namespace {

time_t shift() {
  static const char* const seconds = std::getenv("WALL_CLOCK_SHIFT");
  return seconds == nullptr ? 0 : std::atol(seconds);
}

}  // namespace

extern "C" {

int clock_gettime(clockid_t clock, timespec* time) noexcept {
  const long failed = syscall(SYS_clock_gettime, clock, time);
  if (failed == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
    time->tv_sec += shift();
  }
  return static_cast<int>(failed);
}

int gettimeofday(timeval* time, void*) noexcept {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  *time = {now.tv_sec, now.tv_nsec / 1000};
  return 0;
}

time_t time(time_t* stored) noexcept {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  if (stored != nullptr) *stored = now.tv_sec;
  return now.tv_sec;
}
}
