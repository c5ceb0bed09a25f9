// Sharded passes, over every transport and world: bits, bytes moved, and order.
#include <doctest.h>

#include <array>
#include <future>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "cpp/support/calls.h"
#include "cpp/support/ranks.h"
#include "cpp/support/sharded_plan.h"

namespace dreamcomm::testing {
namespace {

constexpr std::array kWorlds{1, 2, 3, 4, 7};

/// Many sizes and all types, with gradients that some or all ranks lack.
std::vector<Part> many_parts(int size, int salt) {
  static constexpr std::array<std::size_t, 12> kSizes{
      0, 1, 2, 7, 64, 255, 1000, 4099, kTile - 1, kTile, kTile + 1, 2 * kTile + 17};
  const auto world = static_cast<std::size_t>(size);
  const unsigned all = (1U << size) - 1;
  std::vector<Part> parts;
  const auto add = [&](std::vector<std::size_t> counts, bool replicated, unsigned absent) {
    const Part::Types& types =
        kTypes[(parts.size() + static_cast<std::size_t>(salt)) % kTypes.size()];
    parts.push_back({types, std::move(counts), replicated, absent});
  };
  for (const std::size_t elements : kSizes) {
    const auto i = static_cast<int>(parts.size());
    const unsigned absent = i % 4 == 1   ? 1U << (i % size)
                            : i % 4 == 3 ? all & ~(1U << (i % size))
                                         : 0;
    add(counts_of(size, elements, i), false, size == 1 ? 0 : absent);
  }
  add(std::vector<std::size_t>(world, 1), false, 0);  // one element each
  add({1}, true, 0);
  add({1}, true, 1);  // rank 0 lacks it: in a world of one, all do
  add({kTile + 5}, true, 0);
  add(counts_of(size, 300, 0), false, all);  // left out
  add({1}, true, all);
  add({5}, true, 0);
  add(std::vector<std::size_t>(world, 333), false, 0);
  return parts;
}

TEST_CASE("a sharded pass gives the bits of an average in rank order") {
  int salt = 0;
  for (const int size : kWorlds) {
    ++salt;
    const Plan plan(size, 0, many_parts(size, salt), salt);
    for (const Transport transport : transports()) {
      const Setup setup{.transport = transport, .size = size, .heap_bytes = kHeapBytes};
      CAPTURE(setup);
      CHECK_NOTHROW(run_ranks(setup, [&](Communicator& comm) {
        {
          Tensors tensors(plan, comm.rank());
          step(plan, tensors, false, run_on(comm));
          tensors.reset();  // peers no longer read or write here
          step(plan, tensors, true, run_on(comm), 100);
        }
        require(own_heap()->bytes_in_use() == 0, "memory was not given back");
      }));
    }
  }
}

TEST_CASE("a factor makes the average a sum, multiplied by it") {
  for (const int size : {1, 2, 3}) {
    for (const double factor : {1.0, 0.5, 0.3}) {
      const Plan plan(size, factor, small_parts(size, 12, size), 7);
      const Setup setup{.size = size, .heap_bytes = kHeapBytes};
      CAPTURE(setup);
      CAPTURE(factor);
      CHECK_NOTHROW(run_ranks(setup, [&](Communicator& comm) {
        for (const bool split : {false, true}) {
          Tensors tensors(plan, comm.rank());
          step(plan, tensors, split, run_on(comm));
        }
      }));
    }
  }
}

TEST_CASE("more parameters than a page has room for take several turns") {
  constexpr std::size_t kRow = 16;  // bytes of a page for each parameter
  for (const int size : kWorlds) {
    const std::size_t at_once = (tiny_page(size) - 64) / kRow;
    std::vector<Plan> plans;
    for (const std::size_t count : {std::size_t{0}, at_once, at_once + 1, 4 * at_once + 3}) {
      plans.emplace_back(size, 0, small_parts(size, count, 0), 5);
    }
    for (const Transport transport : transports()) {
      const Setup setup{.transport = transport,
                        .size = size,
                        .page_bytes = tiny_page(size),
                        .heap_bytes = kHeapBytes};
      CAPTURE(setup);
      CHECK_NOTHROW(run_ranks(setup, [&](Communicator& comm) {
        for (const Plan& plan : plans) {
          for (const bool split : {false, true}) {
            Tensors tensors(plan, comm.rank());
            pause(500);
            step(plan, tensors, split, run_on(comm), 20);
          }
        }
      }));
    }
  }
}

TEST_CASE("a sharded pass moves the textbook's bytes, in place") {
  for (const int size : {2, 3, 4, 7}) {
    std::vector<Part> parts;
    for (const Part::Types& types : kTypes) {
      parts.push_back({types, std::vector<std::size_t>(static_cast<std::size_t>(size), 4 * 333)});
    }
    parts[1].types.parameter = DType::kFloat32;
    const Plan plan(size, 0, parts, 3);
    const Setup setup{.size = size, .heap_bytes = kHeapBytes};
    CAPTURE(setup);
    CHECK_NOTHROW(run_ranks(setup, [&](Communicator& comm) {
      Tensors tensors(plan, comm.rank());
      step(plan, tensors, false, run_on(comm));
      tensors.reset();
      step(plan, tensors, true, run_on(comm));
      std::size_t gradients = 0;
      std::size_t parameters = 0;
      for (const Part& part : plan.parts) {
        gradients += part.numel() * item_size(part.types.gradient);
        parameters += part.numel() * item_size(part.types.parameter);
      }
      const auto expect_moved = [&](Kind kind, std::size_t bytes) {
        const Traffic traffic = comm.traffic()[static_cast<std::size_t>(kind)];
        const auto n = static_cast<std::size_t>(comm.size());
        const std::size_t want = bytes / n * (n - 1);
        require(traffic.sent == want, concat("sent ", traffic.sent, ", expected ", want));
        require(traffic.received == want, concat("received ", traffic.received, ", not ", want));
        require(traffic.calls == 1, concat(name(kind), ": ", traffic.calls, " calls"));
        require(traffic.in_place == 1, concat(name(kind), " was staged"));
      };
      expect_moved(Kind::kAllReduce, gradients + parameters);
      expect_moved(Kind::kReduceScatter, gradients);
      expect_moved(Kind::kAllGather, parameters);
    }));
  }
}

TEST_CASE("what ranks send in a sharded pass is what their peers receive") {
  for (const int size : {2, 3, 7}) {
    const Plan plan(size, 0, small_parts(size, 50, 1), 3);
    const Setup setup{.size = size, .heap_bytes = kHeapBytes};
    CAPTURE(setup);
    CHECK_NOTHROW(run_ranks(setup, [&](Communicator& comm) {
      Tensors tensors(plan, comm.rank());
      for (const Kind kind : {Kind::kReduceScatter, Kind::kAllGather}) {
        run_pass(plan, tensors, kind == Kind::kReduceScatter, kind == Kind::kAllGather,
                 run_on(comm));
        const Traffic traffic = comm.traffic()[static_cast<std::size_t>(kind)];
        auto net = static_cast<std::int64_t>(traffic.sent - traffic.received);
        const Block block{reinterpret_cast<std::byte*>(&net), sizeof net};
        Request sum;
        sum.kind = Kind::kAllReduce;
        sum.reduction = {.dtype = DType::kInt64, .op = ReduceOp::kSum};
        sum.in = sum.out = {&block, 1};
        comm.run(sum);
        require(traffic.sent > 0, "nothing was counted");
        require(net == 0, concat(name(kind), ": ", net, " bytes more are sent than received"));
      }
    }));
  }
}

/// How a rank makes a call: its peers may make it otherwise.
enum class Way { kRun, kSubmit, kInTurn };

void mix(const Setup& setup, int calls, unsigned seed) {
  std::vector<Plan> plans;
  for (int i = 0; i < 6; ++i) {
    const std::size_t count = i == 0 ? 0 : i == 1 ? 150 : static_cast<std::size_t>(4 * i);
    plans.emplace_back(setup.size, i == 2 ? 0.5 : 0, small_parts(setup.size, count, i), i);
  }
  CAPTURE(setup);
  CHECK_NOTHROW(run_ranks(setup, [&](Communicator& comm) {
    std::mt19937 random(seed);  // alike on all ranks
    std::mt19937 own(seed + 77U * static_cast<unsigned>(comm.rank()));
    std::vector<std::future<void>> jobs;
    const Run in_job = [&comm](const Request& request) { comm.run_ordered(request); };
    for (int i = 0; i < calls; ++i) {
      const Plan& plan = plans[random() % plans.size()];
      const bool split = random() % 2 == 0;
      const bool ordinary = random() % 3 == 0;
      const Case one{Kind::kAllReduce, DType::kFloat32, ReduceOp::kAvg, random() % 300, 0, i};
      const auto tensors = ordinary ? nullptr : std::make_shared<Tensors>(plan, comm.rank());
      const auto call = [&comm, &plan, &in_job, &setup, tensors, split, one](bool job) {
        if (tensors == nullptr) return job ? run_case_in_job(comm, one) : run_case(comm, one);
        step(plan, *tensors, split, job ? in_job : run_on(comm), setup.delays);
      };
      pause(setup.delays);
      switch (static_cast<Way>(own() % 3)) {
        case Way::kRun:
          call(false);
          break;
        case Way::kInTurn:
          comm.run_in_turn([&] { call(true); });
          break;
        case Way::kSubmit:
          const auto job = std::make_shared<std::packaged_task<void()>>([call] { call(true); });
          jobs.push_back(job->get_future());
          comm.submit([job] { (*job)(); });
      }
    }
    for (auto& job : jobs) job.get();
  }));
}

TEST_CASE("sharded passes and collectives run in the order they were made, under random delays") {
  for (const Transport transport : transports()) {
    for (const int size : {2, 3, 4}) {
      for (const int delays : {0, 100}) {
        mix({.transport = transport,
             .size = size,
             .page_bytes = tiny_page(size),
             .start = 0xFFFFFF80U,
             .delays = delays,
             .heap_bytes = kHeapBytes},
            60, static_cast<unsigned>(size + delays));
      }
    }
  }
}

}  // namespace
}  // namespace dreamcomm::testing
