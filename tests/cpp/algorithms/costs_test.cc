// The cost model: what is measured, stored, and used for the choice.
#include "algorithms/cost/costs.h"

#include <doctest.h>

#include <cmath>
#include <mutex>
#include <vector>

#include "algorithms/adaptive_copy.h"
#include "algorithms/table.h"
#include "core/cpus.h"
#include "cpp/support/calls.h"
#include "cpp/support/ranks.h"
#include "kernels/transfer/stream.h"

namespace dreamcomm::testing {
namespace {

/// Only one kind of copy costs anything.
Costs only(CopyKind motion, double seconds_per_byte, double turn = 0) {
  Costs costs;
  costs.turn = turn;
  costs.rates[static_cast<std::size_t>(motion)].fill(seconds_per_byte);
  return costs;
}

CallShape all_reduce(std::size_t bytes, int size, bool in_heaps = false) {
  return {Kind::kAllReduce,       ReduceOp::kSum, bytes,   size,
          std::size_t{512} << 10, in_heaps,       in_heaps};
}

std::string_view picked(const CallShape& call, const Costs& costs) {
  return algorithm_table()[pick(call, {"auto", true, &costs})].name;
}

TEST_CASE("rates are interpolated over the logarithm of the size, and flat outside") {
  Costs costs;
  costs.rates[0] = {1, 2, 3, 4, 5, 6};
  const auto at = [&](std::size_t bytes) {
    return costs.seconds(CostTerms{}.with(CopyKind::kGive, 1), bytes);
  };
  CHECK(at(1) == 1);
  CHECK(at(4 << 10) == 1);
  CHECK(at(32 << 10) == 2);
  CHECK(at(256 << 10) == 3);
  CHECK(at(std::size_t{1} << 40) == 6);
  const double between = at(128 << 10);  // two thirds of the way from 32 to 256 KiB
  CHECK(std::abs(between - (2 + 2.0 / 3)) < 1e-12);
}

TEST_CASE("the least predicted time wins") {
  // Every byte read costs: direct reads the least. Every wait costs: one_shot waits once.
  CHECK(picked(all_reduce(1 << 20, 4), only(CopyKind::kFold, 1e-9)) == "direct");
  CHECK(picked(all_reduce(1 << 10, 4), only(CopyKind::kGive, 0, 1e-6)) == "one_shot");
  CHECK(picked(all_reduce(1 << 10, 4, true), only(CopyKind::kGive, 0, 1e-6)) == "one_shot");
  CHECK(picked(all_reduce(1 << 10, 4, true), only(CopyKind::kGive, 1e-9)) == "heap");
}

TEST_CASE("rates are those of all memory that a rank's call touches") {
  Costs costs;
  costs.rates[static_cast<std::size_t>(CopyKind::kPull)] = {1, 2, 3, 4, 5, 6};
  const auto per_byte = [&](Kind kind, std::size_t bytes, std::size_t moved) {
    const CallShape call{kind, ReduceOp::kSum, bytes, 3, std::size_t{512} << 10, true, true};
    const std::size_t row = pick(call, {"heap", true, &costs});
    return predict(algorithm_table()[row], call, costs) / static_cast<double>(moved);
  };
  CHECK(per_byte(Kind::kBroadcast, 32 << 10, 32 << 10) == 2);
  CHECK(per_byte(Kind::kAllToAll, 16 << 10, 16 << 10) == 2);       // in and out
  CHECK(per_byte(Kind::kAllGather, 8 << 10, 3 * (8 << 10)) == 2);  // a block in, three out
}

TEST_CASE("heaps are asked for if that pays when all tensors lie there") {
  const Costs waits = only(CopyKind::kGive, 0, 1e-6);
  const Costs copies = only(CopyKind::kGive, 1e-9, 1e-6);
  CHECK_FALSE(asks_for_heaps(all_reduce(1 << 16, 2), {"auto", true, &waits}));
  CHECK(asks_for_heaps(all_reduce(1 << 20, 2), {"auto", true, &copies}));
  CHECK_FALSE(asks_for_heaps(all_reduce(16, 2), {"auto", true, &copies}));
  CHECK_FALSE(asks_for_heaps(all_reduce(1 << 20, 1), {"auto", true, &copies}));
  CHECK_FALSE(asks_for_heaps(all_reduce(1 << 20, 2), {"direct", true, &copies}));
  CHECK(asks_for_heaps(all_reduce(1 << 16, 2), {"heap", true, &waits}));
  CHECK_FALSE(asks_for_heaps({Kind::kBarrier}, {"auto", true, &copies}));
}

TEST_CASE("costs survive their text exactly, and no other text gives costs") {
  Costs costs = Costs::fixed();
  costs.turn = 1.0 / 3e6;
  const std::string text = to_text(costs);
  CHECK(from_text(text) == costs);
  CHECK_FALSE(from_text(""));
  CHECK_FALSE(from_text("dreamcomm-costs-0" + text.substr(17)));
  CHECK_FALSE(from_text(text + " 1"));
  CHECK_FALSE(from_text(text.substr(0, text.size() - 8)));
  std::string negative = text;
  negative.replace(negative.find("give ") + 5, 1, "-");
  CHECK_FALSE(from_text(negative));
  std::string word = text;
  word.replace(word.find("turn ") + 5, 3, "nan");
  CHECK_FALSE(from_text(word));
}

TEST_CASE("all ranks measure the same costs, and calls go on as before") {
  for (const Transport transport : transports()) {
    for (const int size : {1, 2, 3, 4}) {
      for (const std::size_t heap : {std::size_t{0}, std::size_t{64} << 20}) {
        const Setup setup{.transport = transport, .size = size, .heap_bytes = heap};
        CAPTURE(setup);
        CHECK_NOTHROW(run_ranks(setup, [](Communicator& comm) {
          comm.tune(std::nullopt, own_heap());
          const Costs costs = comm.costs();
          require(costs.turn > 0, "a turn took no time");
          for (const Costs::Rates& rates : costs.rates) {
            for (const double rate : rates) require(rate > 0, "a copy took no time");
          }
          // A different choice would be a mismatch; different costs another sum.
          for (const std::size_t count : {1, 1000, 40'001, 300'000}) {
            run_case(comm, {Kind::kAllReduce, DType::kFloat32, ReduceOp::kSum, count, 0, 1, true,
                            own_heap() != nullptr ? Place::kHeap : Place::kPrivate});
            run_case(comm, {Kind::kAllGather, DType::kFloat32, ReduceOp::kNone, count});
          }
          require(comm.traffic()[static_cast<std::size_t>(Kind::kAllReduce)].calls == 4,
                  "measuring was counted as calls");
        }));
      }
    }
  }
}

TEST_CASE("a rank whose heap is full measures in step with the others") {
  const Setup setup{.size = 3, .heap_bytes = std::size_t{32} << 20};
  CHECK_NOTHROW(run_ranks(setup, [](Communicator& comm) {
    std::shared_ptr<std::byte> hog;
    if (comm.rank() == 1) hog = own_heap()->allocate(std::size_t{31} << 20);
    require(comm.rank() != 1 || hog != nullptr, "the heap took less than it has");
    comm.tune(std::nullopt, own_heap());
    run_case(comm, {Kind::kAllReduce, DType::kFloat32, ReduceOp::kSum, 40'001});
  }));
}

TEST_CASE("rank 0's costs are everyone's") {
  const Setup setup{.size = 3};
  CHECK_NOTHROW(run_ranks(setup, [](Communicator& comm) {
    const Costs mine = only(CopyKind::kFold, 1.0 + comm.rank());
    comm.tune(comm.rank() == 0 ? std::optional(mine) : std::nullopt, own_heap());
    require(comm.costs() == only(CopyKind::kFold, 1.0), "other costs than rank 0's");
  }));
}

TEST_CASE("a page writer writes every byte, whichever way it goes") {
  AdaptiveCopy writer;
  std::vector<std::byte> from(100'000);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i * 7 + i / 256);
  for (int round = 0; round < 400; ++round) {
    const std::size_t bytes = static_cast<std::size_t>(round) * 200 + 1;
    const std::size_t skew = static_cast<std::size_t>(round) % 67;
    std::vector<std::byte> to(bytes + skew + 1, std::byte{0xa5});
    writer.write(static_cast<std::uint32_t>(round), to.data() + skew, from.data() + skew % 5,
                 bytes);
    CAPTURE(bytes);
    REQUIRE(std::equal(to.begin() + static_cast<long>(skew), to.end() - 1,
                       from.begin() + static_cast<long>(skew % 5)));
    REQUIRE(to.back() == std::byte{0xa5});
    if (skew > 0) REQUIRE(to[skew - 1] == std::byte{0xa5});
  }
  CHECK(writer.writes() > 150);  // large enough for either way
  CHECK(writer.streamed() > 0);  // both ways were tried
  CHECK(writer.streamed() < writer.writes());
}

TEST_CASE("a page writer wishes for nothing it has not tried") {
  AdaptiveCopy writer;
  std::vector<std::byte> from(64 << 10);
  std::vector<std::byte> to(64 << 10);
  for (std::uint32_t round = 0; round < AdaptiveCopy::kInARow; ++round) {
    writer.write(round, to.data(), from.data(), from.size());
    writer.close();
    REQUIRE(writer.wishes() == 0);
  }
  REQUIRE(writer.streamed() == 0);
}

/// A clock that the test sets.
Clock::time_point set_time{};

TEST_CASE("a page writer leaves a way that turns slow, without a trial") {
  set_time = {};
  AdaptiveCopy writer([] { return set_time; });
  std::vector<std::byte> from(64 << 10);
  std::vector<std::byte> to(64 << 10);
  std::uint32_t round = 0;
  // The time of a peer that reads a page: `plain` if the page was written plainly.
  const auto go_on = [&](std::uint32_t end, std::chrono::microseconds plain) {
    while (round < end) {
      writer.follow(writer.wishes());
      const std::uint64_t streamed = writer.streamed();
      writer.write(round++, to.data(), from.data(), from.size());
      const bool past = writer.streamed() > streamed;
      set_time += past ? std::chrono::microseconds{100} : plain;
      writer.close();
    }
  };
  go_on(AdaptiveCopy::kTrials, std::chrono::microseconds{10});
  const std::uint64_t tried = writer.streamed();
  go_on(140, std::chrono::microseconds{10});
  REQUIRE(writer.streamed() == tried);          // plain is faster
  go_on(200, std::chrono::microseconds{1000});  // the next trials follow after round 200
  CHECK(writer.wishes() != 0);
  CHECK(writer.streamed() > tried + 10);
}

TEST_CASE("a copy past the caches takes any size and place") {
  std::vector<std::byte> from(1000);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i * 11 + 3);
  for (std::size_t bytes = 0; bytes <= 400; bytes += bytes < 140 ? 1 : 37) {
    for (const std::size_t skew : {0U, 1U, 15U, 16U, 63U, 64U}) {
      std::vector<std::byte> to(bytes + 128, std::byte{0xa5});
      stream_copy(to.data() + skew, from.data() + 3, bytes);
      REQUIRE(std::equal(from.begin() + 3, from.begin() + 3 + static_cast<long>(bytes),
                         to.begin() + static_cast<long>(skew)));
      REQUIRE(to[bytes + skew] == std::byte{0xa5});
    }
  }
}

TEST_CASE("a control group's limit counts, no limit does not") {
  CHECK(cpu_limit("150000 100000") == 1.5);
  CHECK_FALSE(cpu_limit("max 100000"));
  CHECK_FALSE(cpu_limit("-1 100000"));
  CHECK_FALSE(cpu_limit(""));
  CHECK_FALSE(cpu_limit("100000 0"));
  CHECK(usable_cpus() >= 1);
}

}  // namespace
}  // namespace dreamcomm::testing
