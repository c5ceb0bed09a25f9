// When a waiting thread offers its processor to others.
#include "transport/wait.h"

#include <doctest.h>

#include <cstdint>

namespace dreamcomm {
namespace {

constexpr std::int64_t kMillisecond = 1'000'000;

/// A clock that only yields advance, each by `cost`.
thread_local std::int64_t now = 0;
thread_local std::int64_t cost = 0;
thread_local int yields = 0;

int yield() {
  now += cost;
  ++yields;
  return 0;
}
std::int64_t read_clock() { return now; }

struct Machine {
  explicit Machine(std::int64_t yield_ns) {
    now = 1;
    yields = 0;
    cost = yield_ns;
  }
  Patience patience{10, 20, {yield, read_clock}};
  /// Milliseconds of waits that would yield every ten microseconds.
  void wait_for(int milliseconds) {
    for (int i = 0; i < milliseconds * 100; ++i) {
      patience.yield();
      patience.settle();
      now += 10'000;
    }
  }
};

TEST_CASE("quick yields go on for ever") {
  Machine machine(500);
  machine.wait_for(10);
  CHECK(yields > 900);
  CHECK(machine.patience.long_yields() == 0);
  CHECK_FALSE(machine.patience.avoids_yields());
}

TEST_CASE("a yield that took long ends them, and they are tried again ever less often") {
  Machine machine(3 * kMillisecond);
  CHECK_FALSE(machine.patience.yield());
  machine.patience.settle();
  CHECK(machine.patience.avoids_yields());
  CHECK_FALSE(machine.patience.yield());  // without trying
  CHECK(yields == 1);
  machine.wait_for(10'000);
  CHECK(yields < 20);  // 60 ms of 10 s
  CHECK(yields > 10);
}

TEST_CASE("a yield that lasts until the awaited rank is ready is not too long") {
  Machine machine(3 * kMillisecond);
  for (int wait = 0; wait < 100; ++wait) {
    CHECK_FALSE(machine.patience.yield());  // sleeps for the rest of this wait
    machine.patience.settle(now - kMillisecond / 10);
  }
  CHECK(yields == 100);
  CHECK(machine.patience.long_yields() == 0);
  CHECK_FALSE(machine.patience.avoids_yields());
  machine.patience.yield();
  machine.patience.settle(now - 2 * kMillisecond);  // it had been ready for long
  CHECK(machine.patience.avoids_yields());
}

TEST_CASE("where the machine is quiet again, so are the waits within two seconds") {
  Machine machine(3 * kMillisecond);
  machine.wait_for(5'000);
  cost = 500;
  machine.wait_for(2'000);
  CHECK_FALSE(machine.patience.avoids_yields());
  const int before = yields;
  machine.wait_for(1);
  CHECK(yields > before + 90);
}

TEST_CASE(
    "long yields are borne as long as the others save more, as those beside a computing rank") {
  Machine machine(500);
  for (int burst = 0; burst < 200; ++burst) {
    cost = 500;
    for (int i = 0; i < 400; ++i) {
      machine.patience.yield();
      machine.patience.settle();
    }
    cost = 3 * kMillisecond;
    machine.patience.yield();
    machine.patience.settle();
  }
  CHECK(machine.patience.long_yields() == 200);
  CHECK_FALSE(machine.patience.avoids_yields());
  machine.wait_for(100);  // now all of them are long
  CHECK(machine.patience.avoids_yields());
}

TEST_CASE("a few quick yields on a busy machine do not bring the long ones back") {
  Machine machine(3 * kMillisecond);
  machine.wait_for(10'000);
  yields = 0;
  for (int second = 0; second < 20; ++second) {
    cost = 500;
    for (int i = 0; i < 50; ++i) {
      machine.patience.yield();
      machine.patience.settle();
    }
    cost = 3 * kMillisecond;
    machine.wait_for(1'000);
  }
  CHECK(machine.patience.long_yields() < 40);
}

}  // namespace
}  // namespace dreamcomm
