// The processor's counter as a clock, against the kernel's.
#include "core/tsc_clock.h"

#include <doctest.h>

#include <chrono>
#include <cstdint>
#include <thread>

namespace dreamcomm {
namespace {

constexpr std::int64_t kOff = 2'000;  // nanoseconds, as the class says

/// Checks for `milliseconds` whether each time lies between two reads of the kernel's clock.
void compare(TscClock& clock, int milliseconds) {
  const std::int64_t end = now_ns() + std::int64_t{milliseconds} * 1'000'000;
  std::int64_t last = 0;
  int wrong = 0;
  for (std::int64_t before = now_ns(); before < end; before = now_ns()) {
    const std::int64_t told = clock.now_ns();
    const std::int64_t after = now_ns();
    wrong += told < before - kOff || told > after + kOff || told < last ? 1 : 0;
    last = told;
  }
  CHECK(wrong == 0);
}

TEST_CASE("the counter's clock gives the kernel's time, and never runs backwards") {
  TscClock clock;
  compare(clock, 100);
  for (const int pause : {0, 1, 3, 20, 200}) {
    std::this_thread::sleep_for(std::chrono::milliseconds(pause));
    compare(clock, 10);
  }
}

TEST_CASE("the counter's clock, read only now and then, gives the kernel's time") {
  TscClock clock;
  for (int i = 0; i < 300; ++i) {
    std::this_thread::sleep_for(std::chrono::microseconds(10 * i));
    const std::int64_t before = now_ns();
    const std::int64_t told = clock.now_ns();
    CHECK(told >= before - kOff);
    CHECK(told <= now_ns() + kOff);
  }
}

}  // namespace
}  // namespace dreamcomm
