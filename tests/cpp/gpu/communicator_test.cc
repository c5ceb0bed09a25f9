// Groups for tensors on GPUs, on devices made of threads: their bootstrap, calls and memory.
#include "gpu/host/communicator.h"

#include <doctest.h>

#include <array>
#include <chrono>
#include <string>
#include <vector>

#include "cpp/gpu/host_communicators.h"
#include "cpp/support/calls.h"
#include "cpp/support/host_driver.h"
#include "cpp/support/ranks.h"
#include "gpu/host/select_algorithm.h"

namespace dreamcomm::testing {
namespace {

using Driver = std::unique_ptr<gpu::Driver>;

TEST_CASE("GPU groups carry out calls of all kinds") {
  for (const int size : {1, 2, 3, 4}) {
    CAPTURE(size);
    with_groups(size, [](gpu::Communicator& group, Communicator& comm) {
      for (const Case& one : cases_of_all_kinds(comm.size())) {
        run_case_by(one, comm.rank(), comm.size(),
                    [&](const Request& request) { run_on(group, request); });
      }
    });
  }
}

/// The reason that all ranks get if rank 1's device is at fault.
std::string why_not(const Faults& faults, int room = 8) {
  const int before = host_memory_in_use();
  std::vector<std::string> reasons(3);
  CHECK_NOTHROW(run_ranks({.size = 3}, [&](Communicator& comm) {
    const gpu::BootstrapResult bootstrapped = gpu::bootstrap(
        comm.rank(), 3,
        [&]() -> Driver { return make_host_driver(0, room, comm.rank() == 1 ? faults : Faults{}); },
        kSmall, exchange_over(comm));
    require(bootstrapped.group == nullptr, "the bootstrap succeeded");
    reasons[static_cast<std::size_t>(comm.rank())] = bootstrapped.why_not;
  }));
  CHECK(reasons[0] == reasons[1]);
  CHECK(reasons[0] == reasons[2]);
  CHECK(host_memory_in_use() == before);
  return reasons[0];
}

TEST_CASE("GPU groups whose bootstrap fails say why on all ranks, and keep no memory") {
  CHECK(why_not({.allocates = false}) == "rank 1: out of memory");
  CHECK(why_not({.opens = false}) == "rank 1: no peer access");
  // Rank 0 is the first that misses rank 1's mark.
  CHECK(has(why_not({.reaches = false}), "rank 0: data that rank 1 wrote into the memory of this"));
  CHECK(
      has(why_not({.reads = false}), "rank 1: a kernel that gathers a number from each rank got"));
  CHECK(has(why_not({}, 2), "more ranks share a device"));
}

TEST_CASE("the bootstrap of GPU groups whose ranks have other options fails") {
  const auto why = [](gpu::CommunicatorOptions other) {
    std::string text;
    CHECK_NOTHROW(run_ranks({.size = 2}, [&](Communicator& comm) {
      const gpu::BootstrapResult bootstrapped = gpu::bootstrap(
          comm.rank(), 2, [] { return make_host_driver(0, 8); }, comm.rank() == 1 ? other : kSmall,
          exchange_over(comm));
      require(bootstrapped.group == nullptr, "the bootstrap succeeded");
      if (comm.rank() == 0) text = bootstrapped.why_not;
    }));
    return text;
  };
  CHECK(has(why({.page_bytes = 1024, .most_blocks = 3, .lanes = 3}),
            "rank 1 has the options page_bytes 1024, most_blocks 3, lanes 3, heap_bytes 0"));
  CHECK(has(why({.page_bytes = 500}), "rank 1: expected pages of a multiple of 128 bytes"));
}

TEST_CASE("a GPU group needs a driver on every rank") {
  CHECK_NOTHROW(run_ranks({.size = 2}, [](Communicator& comm) {
    const gpu::BootstrapResult bootstrapped = gpu::bootstrap(
        comm.rank(), 2,
        [&]() -> Driver {
          if (comm.rank() == 1) throw Error(ErrorKind::kSystem, "no device");
          return make_host_driver(0, 8);
        },
        kSmall, exchange_over(comm));
    require(bootstrapped.why_not == "rank 1: no device", bootstrapped.why_not);
  }));
}

TEST_CASE("a GPU group whose device is lost keeps its memory on all ranks") {
  const int before = host_memory_in_use();
  CHECK_NOTHROW(run_ranks({.size = 2}, [](Communicator& comm) {
    const gpu::Exchange exchange = exchange_over(comm);
    const gpu::BootstrapResult bootstrapped = gpu::bootstrap(
        comm.rank(), 2,
        [&] { return make_host_driver(0, 8, {.drains = comm.rank() == 0 ? -1 : 1}); }, kSmall,
        exchange);
    require(bootstrapped.group != nullptr, bootstrapped.why_not);
    bootstrapped.group->close(exchange);
  }));
  CHECK(host_memory_in_use() == before + 6);  // a window, rounds and memory of the host, each
}

TEST_CASE("GPU tensors in pieces are refused, and harm nothing") {
  with_groups(2, [](gpu::Communicator& group, Communicator& comm) {
    std::array<std::byte, 64> in{};
    std::array<std::byte, 64> out{};
    const Block from{in.data(), 16};
    const std::array to{Block{out.data(), 16}, Block{out.data() + 32, 16}};
    Request request;
    request.kind = Kind::kAllGather;
    request.in = std::span(&from, 1);
    request.out = to;
    require(has(outcome(group, request), "outputs one after the other"), "they were taken");
    const Case one{
        .kind = Kind::kAllReduce, .dtype = DType::kFloat32, .op = ReduceOp::kSum, .count = 9};
    run_case_by(one, comm.rank(), comm.size(), [&](const Request& call) { run_on(group, call); });
  });
}

TEST_CASE("GPU blocks without bytes may be anywhere") {
  with_groups(2, [](gpu::Communicator& group, Communicator& comm) {
    std::array<std::byte, 8> in{};
    in.fill(static_cast<std::byte>(comm.rank() + 1));
    // Each rank gives rank 1 eight bytes, and rank 0 none.
    const std::array from{Block{nullptr, 0}, Block{in.data(), 8}};
    const bool takes = comm.rank() == 1;
    std::array<std::byte, 16> both{};
    const std::array to{Block{takes ? both.data() : nullptr, takes ? 8U : 0U},
                        Block{takes ? both.data() + 8 : nullptr, takes ? 8U : 0U}};
    Request request;
    request.kind = Kind::kAllToAll;
    request.in = from;
    request.out = to;
    request.deadline = Clock::now() + std::chrono::seconds(60);
    const std::string failed = outcome(group, request);
    require(failed.empty(), failed);
    require(!takes || (both[0] == std::byte{1} && both[15] == std::byte{2}), "wrong bytes");
  });
}

TEST_CASE("all_reduce on GPUs uses the algorithm that is asked for") {
  const auto row = [](const char* algorithm, bool fixed_order, bool registered = false) {
    return gpu::choose({.kind = Kind::kAllReduce,
                        .bytes = 1 << 20,
                        .size = 4,
                        .most_blocks = 8,
                        .registered = registered,
                        .asked = gpu::row_asked(algorithm, fixed_order)})
        .row;
  };
  CHECK(row("one_shot", true) == gpu::AlgorithmId::kStaged);
  CHECK(row("direct", true) == gpu::AlgorithmId::kTwoShot);
  CHECK(row("ring", true) == row("auto", true));
  CHECK(row("ring", false) == gpu::AlgorithmId::kRing);
  CHECK(row("heap", true) != gpu::AlgorithmId::kPush);
  CHECK(row("heap", true, true) == gpu::AlgorithmId::kPush);
  with_groups(
      3,
      [](gpu::Communicator& group, Communicator& comm) {
        require(has(group.explain(Kind::kAllReduce, 1 << 20), "there: ring by 3 blocks, expected"),
                group.explain(Kind::kAllReduce, 1 << 20));
        run_case_by(
            {.kind = Kind::kAllReduce, .dtype = DType::kInt32, .op = ReduceOp::kSum, .count = 999},
            comm.rank(), 3, [&](const Request& request) { run_on(group, request); });
      },
      {.page_bytes = 512, .most_blocks = 3, .lanes = 3, .asked = gpu::AlgorithmId::kRing});
}

/// Some ranks' tensors are in registered memory, and sometimes all ranks'.
TEST_CASE("GPU groups carry out calls of all kinds on registered memory") {
  gpu::CommunicatorOptions options = kSmall;
  options.heap_bytes = std::size_t{4} << 20;
  options.costs.turn = 1e-15;  // in place from a few bytes on
  const int before = host_calls_in_place();
  for (const int size : {1, 2, 3, 4}) {
    CAPTURE(size);
    with_groups(
        size,
        [](gpu::Communicator& group, Communicator& comm) {
          int turn = 0;
          for (const Case& one : cases_of_all_kinds(comm.size())) {
            std::byte* const heap = turn++ % 4 == comm.rank() ? nullptr : group.heap().get();
            run_case_by(one, comm.rank(), comm.size(),
                        [&](const Request& request) { run_on(group, request, heap); });
          }
        },
        options);
  }
  CHECK(host_calls_in_place() > before);
}

TEST_CASE("registered memory of a GPU group lives as long as it is held") {
  const int before = host_memory_in_use();
  gpu::CommunicatorOptions options = kSmall;
  options.heap_bytes = 1024;
  std::array<std::shared_ptr<std::byte>, 2> held;
  CHECK_NOTHROW(run_ranks({.size = 2}, [&](Communicator& comm) {
    const gpu::Exchange exchange = exchange_over(comm);
    gpu::BootstrapResult bootstrapped =
        gpu::bootstrap(comm.rank(), 2, [&] { return make_host_driver(0, 8); }, options, exchange);
    require(bootstrapped.group != nullptr, bootstrapped.why_not);
    held[static_cast<std::size_t>(comm.rank())] = bootstrapped.group->heap();
    bootstrapped.group->close(exchange);
  }));
  CHECK(host_memory_in_use() == before + 2);
  for (const auto& memory : held) std::fill_n(memory.get(), options.heap_bytes, std::byte{1});
  held = {};
  CHECK(host_memory_in_use() == before);
}

}  // namespace
}  // namespace dreamcomm::testing
