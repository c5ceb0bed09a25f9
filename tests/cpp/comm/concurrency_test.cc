// Order and safety when jobs, inline calls and messages of several threads mix.
#include <doctest.h>

#include <array>
#include <future>
#include <memory>
#include <random>

#include "cpp/support/calls.h"
#include "cpp/support/ranks.h"

namespace dreamcomm::testing {
namespace {

Case random_case(std::mt19937& random, int size) {
  constexpr std::array kinds{Kind::kBarrier, Kind::kBroadcast,     Kind::kAllReduce,
                             Kind::kReduce,  Kind::kAllGather,     Kind::kGather,
                             Kind::kScatter, Kind::kReduceScatter, Kind::kAllToAll};
  Case one;
  one.kind = kinds[random() % kinds.size()];
  one.dtype = random() % 2 == 0 ? DType::kFloat32 : DType::kBFloat16;
  const bool reduces =
      one.kind == Kind::kAllReduce || one.kind == Kind::kReduce || one.kind == Kind::kReduceScatter;
  if (reduces) one.op = random() % 2 == 0 ? ReduceOp::kSum : ReduceOp::kAvg;
  one.count = random() % 5 == 0 ? random() % 3000 : random() % 60;
  one.root = static_cast<int>(random() % static_cast<unsigned>(size));
  one.salt = static_cast<int>(random() % 1000);
  one.in_place = random() % 2 == 0;
  return one;
}

void mix(const Setup& setup, int calls, unsigned seed) {
  CAPTURE(setup);
  CHECK_NOTHROW(run_ranks(setup, [&](Communicator& comm) {
    std::mt19937 random(seed);  // alike on all ranks
    std::mt19937 own(
        seed + 77U * static_cast<unsigned>(comm.rank()));  // how to call: different on each rank
    std::vector<std::future<void>> jobs;
    for (int i = 0; i < calls; ++i) {
      const Case one = random_case(random, comm.size());
      pause(setup.delays);
      if (own() % 2 == 0) {
        run_case(comm, one);
        continue;
      }
      auto done = std::make_shared<std::promise<void>>();
      jobs.push_back(done->get_future());
      comm.submit([&comm, one, done, delays = setup.delays] {
        try {
          pause(delays);
          run_case_in_job(comm, one);
          done->set_value();
        } catch (...) {
          done->set_exception(std::current_exception());
        }
      });
    }
    for (auto& job : jobs) job.get();
  }));
}

TEST_CASE("jobs and inline calls run in the order they were made") {
  for (const Transport transport : transports()) {
    for (const int size : {2, 3, 4}) {
      mix({.transport = transport, .size = size, .page_bytes = tiny_page(size)}, 150, 3);
    }
  }
}

TEST_CASE("random collectives under random delays") {
  for (const Transport transport : transports()) {
    for (unsigned seed = 0; seed < 4; ++seed) {
      mix({.transport = transport,
           .size = 3,
           .page_bytes = tiny_page(3),
           .start = 0xFFFFFF00U,
           .delays = 150},
          80, seed);
    }
  }
}

TEST_CASE("a group ends while its jobs have just finished") {
  for (int i = 0; i < 30; ++i) {
    const Setup setup{.size = 2, .page_bytes = tiny_page(2)};
    CHECK_NOTHROW(run_ranks(setup, [](Communicator& comm) {
      std::promise<void> done;
      comm.submit([&] {
        run_case_in_job(comm, {Kind::kAllReduce, DType::kInt32, ReduceOp::kSum, 10});
        done.set_value();
      });
      done.get_future().get();
      comm.shutdown();
      comm.shutdown();
      bool refused = false;
      try {
        run_case(comm, {.kind = Kind::kBarrier});
      } catch (const Error& error) {
        refused = error.kind() == ErrorKind::kAborted;
      }
      require(refused, "a call after shutdown was not refused");
    }));
  }
}

}  // namespace
}  // namespace dreamcomm::testing
