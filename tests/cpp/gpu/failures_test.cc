// Groups for tensors on GPUs, on devices made of threads: how their calls fail, and their errors.
#include <doctest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "cpp/gpu/host_communicators.h"
#include "cpp/support/host_driver.h"
#include "cpp/support/ranks.h"
#include "gpu/host/communicator.h"

namespace dreamcomm::testing {
namespace {

TEST_CASE("a late rank is named, and the group's later calls say why they fail") {
  with_groups(3, [](gpu::Communicator& group, Communicator& comm) {
    std::array<float, 10> data{};
    const Block block{reinterpret_cast<std::byte*>(data.data()), sizeof data};
    if (comm.rank() != 2) {
      const std::string text = outcome(group, sum_of(block, std::chrono::milliseconds(60)));
      const bool named = has(text, "all_reduce(SUM, 10 x float32) on rank") &&
                         has(text, "(call 1 on GPUs)") &&
                         (has(text, "after 0.1 s of waiting for rank 2, which has not entered") ||
                          has(text, "has aborted the group"));
      require(named, text);
      const std::string again = outcome(group, sum_of(block));
      require(has(again, "takes no more tensors on GPUs: all_reduce(SUM"), again);
    }
    comm.run(Request{});
  });
}

TEST_CASE("different GPU calls are reported, and move nothing") {
  std::atomic<int> found{0};
  with_groups(2, [&](gpu::Communicator& group, Communicator& comm) {
    std::vector<float> data(comm.rank() == 0 ? 10 : 11, 1.0F);
    const Block block{reinterpret_cast<std::byte*>(data.data()), data.size() * sizeof(float)};
    const std::string text = outcome(group, sum_of(block));
    if (has(text, "made another call")) ++found;
    const char* const theirs = comm.rank() == 0 ? "rank 1 made another call: all_reduce(SUM, 11 x"
                                                : "rank 0 made another call: all_reduce(SUM, 10 x";
    require(has(text, theirs) || has(text, "has aborted the group"), text);
    for (const float value : data) require(value == 1.0F, "data was moved");
    comm.run(Request{});
  });
  CHECK(found >= 1);
}

TEST_CASE("abort ends a GPU group's waiting call on all ranks") {
  with_groups(2, [](gpu::Communicator& group, Communicator& comm) {
    std::array<float, 10> data{};
    const Block block{reinterpret_cast<std::byte*>(data.data()), sizeof data};
    if (comm.rank() == 0) {
      std::jthread later([&, begun = host_kernels_begun()] {
        await_host_kernel(begun);
        group.abort();
      });
      const std::string text = outcome(group, sum_of(block));
      require(has(text, "was ended by abort()"), text);
    }
    comm.run(Request{});
    if (comm.rank() == 1) {
      const std::string text = outcome(group, sum_of(block));
      require(has(text, "rank 0 has aborted the group"), text);
    }
    comm.run(Request{});
  });
}

TEST_CASE("a GPU group's errors say what the host knows of its ranks") {
  with_groups(2, [](gpu::Communicator& group, Communicator& comm) {
    std::array<float, 10> data{};
    const Block block{reinterpret_cast<std::byte*>(data.data()), sizeof data};
    std::atomic<bool> ended{false};
    group.describe_as("here: ",
                      {.lost = [&] { return ended ? "the process of rank 1 has ended" : ""; },
                       .does = [](int rank) { return concat("rank ", rank, " sleeps"); }});
    if (comm.rank() == 0) {
      std::jthread later([&, begun = host_kernels_begun()] {
        await_host_kernel(begun);
        ended = true;
        group.abort();
      });
      const std::string text = outcome(group, sum_of(block));
      require(has(text,
                  "here: all_reduce(SUM, 10 x float32) on rank 0 of 2 (call 1 on GPUs) "
                  "cannot finish: the process of rank 1 has ended"),
              text);
      ended = false;
      require(group.failure().value().what() == text, "a failure's text has changed");
    }
    comm.run(Request{});
  });
  with_groups(2, [](gpu::Communicator& group, Communicator& comm) {
    std::array<float, 10> data{};
    const Block block{reinterpret_cast<std::byte*>(data.data()), sizeof data};
    group.describe_as("", {.does = [](int rank) { return concat("rank ", rank, " sleeps"); }});
    if (comm.rank() == 0) {
      const std::string text = outcome(group, sum_of(block, std::chrono::milliseconds(50)));
      require(has(text, "rank 1, which has not entered this call; rank 1 sleeps"), text);
    }
    comm.run(Request{});
  });
}

TEST_CASE("calls that succeeded stay so when a GPU group is ended") {
  with_groups(2, [](gpu::Communicator& group, Communicator& comm) {
    std::array<float, 10> data{};
    const Block block{reinterpret_cast<std::byte*>(data.data()), sizeof data};
    require(outcome(group, sum_of(block)).empty(), "the call failed");
    comm.run(Request{});
    group.abort();
    require(!group.failure_of_calls(), "a call that succeeded is reported as failed");
    require(has(group.failure().value().what(), "abort() was called"), "nothing is reported");
    comm.run(Request{});
  });
}

TEST_CASE("a GPU group reports to other hosts whether it has failed, and fails when they have") {
  with_groups(2, [](gpu::Communicator& group, Communicator& comm) {
    std::vector<float> data(4);
    const Block block{reinterpret_cast<std::byte*>(data.data()), data.size() * sizeof(float)};
    std::uint64_t own = 1;
    group.run(sum_of(block), nullptr);
    group.put_verdict(reinterpret_cast<std::byte*>(&own), nullptr);
    require(own == 0, "a call that succeeded is reported as failed");
    std::uint64_t theirs = 0;
    group.take_verdict(reinterpret_cast<std::byte*>(&theirs), nullptr);
    require(!group.failure(), "a call that succeeded elsewhere is reported as failed");
    comm.run(Request{});  // a barrier: the peer may still be in the call
    theirs = 1;
    group.take_verdict(reinterpret_cast<std::byte*>(&theirs), nullptr);
    require(has(group.failure().value().what(), "a rank of another host"), "it is not reported");
    require(has(outcome(group, sum_of(block)), "takes no more tensors"), "a call after it");
  });
  with_groups(2, [](gpu::Communicator& group, Communicator& comm) {
    std::vector<float> data(4);
    const Block block{reinterpret_cast<std::byte*>(data.data()), data.size() * sizeof(float)};
    Request request = sum_of(block);
    if (comm.rank() == 1) request.reduction.op = ReduceOp::kMax;
    outcome(group, request);
    std::uint64_t own = 0;
    group.put_verdict(reinterpret_cast<std::byte*>(&own), nullptr);
    require(own != 0, "a mismatch is not reported");
  });
}

}  // namespace
}  // namespace dreamcomm::testing
