// Every collective, over every transport, world and algorithm: the right bits.
#include <doctest.h>

#include <array>

#include "cpp/support/calls.h"
#include "cpp/support/ranks.h"

namespace dreamcomm::testing {
namespace {

constexpr std::array kWorlds{1, 2, 3, 4, 7};
constexpr std::array<std::size_t, 8> kCounts{0, 1, 2, 7, 64, 255, 1000, 4099};

void run_all_kinds(Communicator& comm, DType dtype, std::size_t count, int salt,
                   Place place = Place::kPrivate) {
  const int root = salt % comm.size();
  for (const Kind kind :
       {Kind::kBroadcast, Kind::kAllGather, Kind::kGather, Kind::kScatter, Kind::kAllToAll}) {
    run_case(comm, {kind, dtype, ReduceOp::kNone, count, root, salt, salt % 2 == 1, place});
  }
  run_case(comm, {.kind = Kind::kBarrier});
  for (const Kind kind : {Kind::kAllReduce, Kind::kReduce, Kind::kReduceScatter}) {
    for (const ReduceOp op :
         {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMax, ReduceOp::kPremulSum}) {
      if (!is_defined(op, dtype)) continue;
      run_case(comm, {kind, dtype, op, count, root, salt, salt % 2 == 0, place});
    }
  }
}

TEST_CASE("all collectives give the right bits") {
  for (const Transport transport : transports()) {
    for (const int size : kWorlds) {
      for (const bool tiny : {true, false}) {
        Setup setup{.transport = transport, .size = size};
        if (tiny) setup.page_bytes = tiny_page(size);
        CAPTURE(setup);
        CHECK_NOTHROW(run_ranks(setup, [](Communicator& comm) {
          int salt = 0;
          for (const std::size_t count : kCounts) {
            for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kInt64}) {
              run_all_kinds(comm, dtype, count, ++salt);
            }
          }
        }));
      }
    }
  }
}

TEST_CASE("tensors in heaps give the same bits as others") {
  // Around the size from which a call asks for heaps, and beyond a block of its loops.
  static constexpr std::array<std::size_t, 5> kLarge{1, 2047, 2048, 4099, 9'001};
  for (const Transport transport : transports()) {
    for (const int size : kWorlds) {
      Setup setup{.transport = transport, .size = size, .heap_bytes = std::size_t{16} << 20};
      setup.page_bytes = std::size_t{16} << 10;  // some chunks of those that are staged
      CAPTURE(setup);
      CHECK_NOTHROW(run_ranks(setup, [](Communicator& comm) {
        int salt = 0;
        for (const std::size_t count : kLarge) {
          for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
            for (const Place place : {Place::kHeap, Place::kMixed, Place::kPrivate}) {
              run_all_kinds(comm, dtype, count, ++salt, place);
            }
          }
        }
        require(own_heap()->bytes_in_use() == 0, "memory was not given back");
      }));
    }
  }
}

TEST_CASE("a call on heaps moves the textbook's bytes") {
  for (const int size : {2, 3, 4}) {
    const Setup setup{.size = size, .heap_bytes = std::size_t{16} << 20};
    CAPTURE(setup);
    CHECK_NOTHROW(run_ranks(setup, [](Communicator& comm) {
      const auto n = static_cast<std::size_t>(comm.size());
      const std::size_t bytes = 12 * 4096;
      for (const Kind kind : {Kind::kAllReduce, Kind::kReduceScatter, Kind::kAllGather}) {
        const auto op = kind == Kind::kAllGather ? ReduceOp::kNone : ReduceOp::kSum;
        run_case(comm, {kind, DType::kInt32, op, bytes / 4, 0, 0, true, Place::kHeap});
        const Traffic traffic = comm.traffic()[static_cast<std::size_t>(kind)];
        const std::size_t want =
            kind == Kind::kAllReduce ? 2 * (n - 1) * bytes / n : (n - 1) * bytes;
        require(traffic.sent == want, concat("sent ", traffic.sent, ", expected ", want));
        require(traffic.received == want, concat("received ", traffic.received, ", not ", want));
        require(traffic.in_place == 1, concat(name(kind), " was staged"));
      }
    }));
  }
}

TEST_CASE("all types take all operations that are defined on them") {
  for (const Transport transport : transports()) {
    const Setup setup{.transport = transport, .size = 3, .page_bytes = tiny_page(3)};
    CAPTURE(setup);
    CHECK_NOTHROW(run_ranks(setup, [](Communicator& comm) {
      for (int type = 0; type <= static_cast<int>(DType::kComplex128); ++type) {
        for (int op = 0; op < static_cast<int>(ReduceOp::kNone); ++op) {
          const auto dtype = static_cast<DType>(type);
          const auto reduction = static_cast<ReduceOp>(op);
          if (!is_defined(reduction, dtype)) continue;
          run_case(comm, {Kind::kAllReduce, dtype, reduction, 333, 0, op});
          run_case(comm, {Kind::kReduceScatter, dtype, reduction, 45, 0, op});
        }
      }
    }));
  }
}

TEST_CASE("named algorithms give the right results") {
  // Integers: the ring may add in another order.
  for (const Transport transport : transports()) {
    for (const int size : kWorlds) {
      for (const char* algorithm : {"ring", "master", "direct", "one_shot"}) {
        Setup setup{.transport = transport, .size = size, .page_bytes = tiny_page(size)};
        setup.comm.algorithm = algorithm;
        setup.comm.fixed_order = false;
        CAPTURE(setup);
        CHECK_NOTHROW(run_ranks(setup, [](Communicator& comm) {
          for (const std::size_t count : kCounts) {
            for (const Kind kind : {Kind::kAllReduce, Kind::kReduceScatter, Kind::kAllGather}) {
              const auto op = kind == Kind::kAllGather ? ReduceOp::kNone : ReduceOp::kSum;
              run_case(comm, {kind, DType::kInt64, op, count, 0, 5});
              if (op == ReduceOp::kNone) continue;
              run_case(comm, {kind, DType::kInt32, ReduceOp::kAvg, count, 0, 6, true});
            }
          }
        }));
      }
    }
  }
}

TEST_CASE("counters may wrap around") {
  for (const int size : {2, 3}) {
    Setup setup{.size = size, .page_bytes = tiny_page(size), .start = 0xFFFFFFF0U};
    CHECK_NOTHROW(run_ranks(setup, [](Communicator& comm) {
      for (int i = 0; i < 40; ++i) run_all_kinds(comm, DType::kFloat32, 300, i);
    }));
  }
}

TEST_CASE("the textbook's bytes are moved, no more") {
  struct Expected {
    const char* algorithm;
    Kind kind;
    std::size_t (*per_rank)(std::size_t n, std::size_t bytes, bool root);
  };
  const auto all_reduce = [](std::size_t n, std::size_t s, bool) { return 2 * (n - 1) * s / n; };
  const auto half = [](std::size_t n, std::size_t s, bool) { return (n - 1) * s; };
  const std::array expected{
      Expected{"ring", Kind::kAllReduce, all_reduce},
      Expected{"direct", Kind::kAllReduce, all_reduce},
      Expected{"ring", Kind::kReduceScatter, half},
      Expected{"direct", Kind::kReduceScatter, half},
      Expected{"ring", Kind::kAllGather, half},
      Expected{"direct", Kind::kAllGather, half},
      Expected{"master", Kind::kAllReduce,
               [](std::size_t n, std::size_t s, bool root) { return root ? (n - 1) * s : s; }},
  };
  for (const int size : {2, 3, 4, 7}) {
    for (const Expected& one : expected) {
      Setup setup{.size = size, .page_bytes = tiny_page(size)};
      setup.comm.algorithm = one.algorithm;
      setup.comm.fixed_order = false;
      CAPTURE(setup);
      CHECK_NOTHROW(run_ranks(setup, [&](Communicator& comm) {
        const auto n = static_cast<std::size_t>(comm.size());
        const std::size_t count = 420 * 7 * n;  // divisible by every world
        const auto op = one.kind == Kind::kAllGather ? ReduceOp::kNone : ReduceOp::kSum;
        run_case(comm, {one.kind, DType::kInt32, op, count});
        const Traffic traffic = comm.traffic()[static_cast<std::size_t>(one.kind)];
        const std::size_t want = one.per_rank(n, count * 4, comm.rank() == 0);
        require(traffic.calls == 1, "calls: " + std::to_string(traffic.calls));
        require(traffic.sent == want, concat("sent ", traffic.sent, ", expected ", want));
        require(traffic.received == want, concat("received ", traffic.received, ", not ", want));
      }));
    }
  }
}

}  // namespace
}  // namespace dreamcomm::testing
