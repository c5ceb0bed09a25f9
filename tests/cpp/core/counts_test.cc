#include "core/counts.h"

#include <array>
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "doctest.h"

using namespace dreamcomm;

namespace {

using Bits = std::vector<std::uint64_t>;

double divisor_of(const Bits& counts, bool along_tree = false) {
  GradientCounts made(RankCount::of_whole(0), along_tree);
  made.take(counts);
  made.require();
  return made.divisor();
}

std::string refusal_of(const Bits& counts) {
  GradientCounts made(RankCount::of_whole(0), false);
  made.take(counts);
  try {
    made.require();
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::kMismatch);
    return error.what();
  }
  return "";
}

std::uint64_t whole(std::int64_t number) { return RankCount::of_whole(number).bits(); }
std::uint64_t weight(double number) { return RankCount::of_weight(number).bits(); }
std::uint64_t fault(CountFault why) { return RankCount::of_fault(why).bits(); }

}  // namespace

TEST_CASE("counts: each is what it was made of") {
  for (const std::int64_t number : {std::int64_t{0}, std::int64_t{1}, RankCount::kMost}) {
    const RankCount one = RankCount::of_whole(number);
    CHECK(one.is_whole());
    CHECK(one.whole() == number);
    CHECK(!one.fault());
  }
  for (const double number : {0.0, 0.25, 1e300, std::numeric_limits<double>::min()}) {
    const RankCount one = RankCount::of_weight(number);
    CHECK(!one.is_whole());
    CHECK(one.weight() == number);
    CHECK(!one.fault());
  }
  CHECK(RankCount::of_weight(-0.0).bits() == RankCount::of_weight(0.0).bits());
  for (const CountFault why : {CountFault::kMissing, CountFault::kTwice, CountFault::kReduced}) {
    CHECK(RankCount::of_fault(why).fault() == why);
    CHECK(!RankCount::of_fault(why).is_whole());
  }
}

TEST_CASE("counts: whole numbers are added exactly") {
  constexpr std::int64_t kBeyondFloat = (std::int64_t{1} << 24) + 1;
  CHECK(divisor_of({whole(kBeyondFloat), whole(0), whole(2)}) == double{kBeyondFloat + 2});
  constexpr std::int64_t kLarge = (std::int64_t{1} << 53) - 3;
  CHECK(divisor_of({whole(kLarge), whole(1), whole(1)}) == double{kLarge + 2});
}

TEST_CASE("counts: weights are added in the ranks' order, or along the tree") {
  const Bits counts{weight(1e16), weight(1), weight(1), weight(1)};
  CHECK(divisor_of(counts) == ((1e16 + 1) + 1) + 1);
  CHECK(divisor_of(counts, /*along_tree=*/true) == (1e16 + 1) + (1.0 + 1.0));
  CHECK(divisor_of({whole(3), weight(0.5)}) == 3.5);
}

TEST_CASE("counts: nothing counted divides to zeros") {
  CHECK(std::isinf(divisor_of({whole(0), whole(0)})));
  CHECK(std::isinf(divisor_of({weight(0), whole(0)})));
}

TEST_CASE("counts: each rank without one is named") {
  const std::string text =
      refusal_of({whole(1), fault(CountFault::kMissing), fault(CountFault::kTwice)});
  CHECK(text.find("rank 1 ran a backward pass without count(n)") != std::string::npos);
  CHECK(text.find("rank 2 called count(n) several times") != std::string::npos);
  CHECK(text.find("rank 0") == std::string::npos);
  CHECK(refusal_of({whole(1), fault(CountFault::kReduced)}).find("rank 1 adds to gradients") !=
        std::string::npos);
}

TEST_CASE("counts: those that an earlier call has left are taken") {
  const std::array<std::uint64_t, 2> left{whole(2), whole(5)};
  GradientCounts made(RankCount::of_whole(2), false);
  made.expect_at(left);
  CHECK(!made.is_known());
  made.require();
  CHECK(made.divisor() == 7);
}

TEST_CASE("counts: two threads that ask at once both learn of a missing one") {
  const Bits counts{whole(3), fault(CountFault::kMissing)};
  for (int round = 0; round < 200; ++round) {
    GradientCounts made(RankCount::of_whole(3), false);
    made.expect_at(counts);
    std::atomic<int> refused{0};
    std::barrier both(2);
    const auto ask = [&] {
      both.arrive_and_wait();
      try {
        made.require();
      } catch (const Error&) {
        ++refused;
      }
    };
    std::thread other(ask);
    ask();
    other.join();
    CHECK(refused == 2);
  }
}
