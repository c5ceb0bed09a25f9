// Groups for tensors on GPUs, on devices made of threads: how they meet, call, fail, end.
#include <doctest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "calls.h"
#include "gpu/choice.h"
#include "gpu/group.h"
#include "gpu_groups.h"
#include "host_driver.h"
#include "ranks.h"

namespace dreamcomm::testing {
namespace {

using Driver = std::unique_ptr<gpu::Driver>;

constexpr gpu::GroupOptions kSmall{.page_bytes = 512, .most_blocks = 3, .lanes = 3};

void with_groups(int size, const std::function<void(gpu::Group&, Communicator&)>& body,
                 const gpu::GroupOptions& options = kSmall) {
  const int before = host_memory_in_use();
  CHECK_NOTHROW(run_ranks({.size = size}, [&](Communicator& comm) {
    const gpu::Exchange exchange = exchange_over(comm);
    gpu::Meeting meeting = gpu::meet(
        comm.rank(), size, [&] { return make_host_driver(comm.rank() % 2, 8); }, options, exchange);
    require(meeting.group != nullptr, meeting.why_not);
    body(*meeting.group, comm);
    meeting.group->close(exchange);
  }));
  CHECK(host_memory_in_use() == before);
}

/// The tensors of the call in memory of their own, or that which is given, block after block.
class Rows {
 public:
  Rows(const Request& request, std::byte* memory) {
    std::size_t bytes = 0;
    for (const Block& block : request.in) bytes += block.bytes;
    for (const Block& block : request.out) bytes += block.bytes;
    memory_.resize(bytes + 1);
    if (memory == nullptr) memory = memory_.data();
    const bool same =
        !request.in.empty() && !request.out.empty() && request.in[0].data == request.out[0].data;
    std::byte* at = place(request.in, in_, memory);
    place(request.out, out_, same ? memory : at);
  }
  Request request_like(const Request& request) const {
    Request mine = request;
    mine.in = in_;
    mine.out = out_;
    for (std::size_t i = 0; i < in_.size(); ++i) {
      std::copy_n(request.in[i].data, in_[i].bytes, in_[i].data);
    }
    return mine;
  }
  void bring(const Request& request) const {
    for (std::size_t i = 0; i < out_.size(); ++i) {
      std::copy_n(out_[i].data, out_[i].bytes, request.out[i].data);
    }
  }

 private:
  static std::byte* place(std::span<const Block> blocks, std::vector<Block>& to, std::byte* at) {
    for (const Block& block : blocks) {
      to.push_back({at, block.bytes});
      at += block.bytes;
    }
    return at;
  }
  std::vector<std::byte> memory_;
  std::vector<Block> in_;
  std::vector<Block> out_;
};

void run_on(gpu::Group& group, const Request& request, std::byte* memory = nullptr) {
  const Rows rows(request, memory);
  group.run(rows.request_like(request), nullptr);
  if (const auto failed = group.failure()) throw *failed;
  rows.bring(request);
}

Request sum_of(const Block& data, std::chrono::milliseconds time = std::chrono::seconds(60)) {
  Request request;
  request.kind = Kind::kAllReduce;
  request.reduction = {.dtype = DType::kFloat32, .op = ReduceOp::kSum};
  request.in = request.out = std::span(&data, 1);
  request.deadline = Clock::now() + time;
  return request;
}

/// What making the call, or the kernel, says.
std::string outcome(gpu::Group& group, const Request& request) {
  try {
    group.run(request, nullptr);
  } catch (const Error& error) {
    return error.what();
  }
  const auto failed = group.failure();
  return failed ? failed->what() : "";
}

bool has(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

TEST_CASE("GPU groups carry out calls of all kinds") {
  for (const int size : {1, 2, 3, 4}) {
    CAPTURE(size);
    with_groups(size, [](gpu::Group& group, Communicator& comm) {
      for (const Case& one : cases_of_all_kinds(comm.size())) {
        run_case_by(one, comm.rank(), comm.size(),
                    [&](const Request& request) { run_on(group, request); });
      }
    });
  }
}

/// What the ranks are told when rank 1's device is at fault; the same on all.
std::string why_not(const Faults& faults, int room = 8) {
  const int before = host_memory_in_use();
  std::vector<std::string> told(3);
  CHECK_NOTHROW(run_ranks({.size = 3}, [&](Communicator& comm) {
    const gpu::Meeting meeting = gpu::meet(
        comm.rank(), 3,
        [&]() -> Driver { return make_host_driver(0, room, comm.rank() == 1 ? faults : Faults{}); },
        kSmall, exchange_over(comm));
    require(meeting.group == nullptr, "they met");
    told[static_cast<std::size_t>(comm.rank())] = meeting.why_not;
  }));
  CHECK(told[0] == told[1]);
  CHECK(told[0] == told[2]);
  CHECK(host_memory_in_use() == before);
  return told[0];
}

TEST_CASE("GPU groups that cannot meet say why on all ranks, and keep no memory") {
  CHECK(why_not({.allocates = false}) == "rank 1: out of memory");
  CHECK(why_not({.opens = false}) == "rank 1: no peer access");
  // Rank 0 is the first that misses rank 1's mark.
  CHECK(has(why_not({.reaches = false}), "rank 0: what rank 1 wrote into the memory of this"));
  CHECK(
      has(why_not({.reads = false}), "rank 1: a kernel that gathers one word from each rank got"));
  CHECK(has(why_not({}, 2), "more ranks share a device"));
}

TEST_CASE("GPU groups whose ranks have other options do not meet") {
  const auto told = [](gpu::GroupOptions other) {
    std::string text;
    CHECK_NOTHROW(run_ranks({.size = 2}, [&](Communicator& comm) {
      const gpu::Meeting meeting = gpu::meet(
          comm.rank(), 2, [] { return make_host_driver(0, 8); }, comm.rank() == 1 ? other : kSmall,
          exchange_over(comm));
      require(meeting.group == nullptr, "they met");
      if (comm.rank() == 0) text = meeting.why_not;
    }));
    return text;
  };
  CHECK(has(told({.page_bytes = 1024, .most_blocks = 3, .lanes = 3}),
            "rank 1 has the options page_bytes 1024, most_blocks 3, lanes 3, heap_bytes 0"));
  CHECK(has(told({.page_bytes = 500}), "rank 1: expected pages of a multiple of 128 bytes"));
}

TEST_CASE("a GPU group needs a driver on every rank") {
  CHECK_NOTHROW(run_ranks({.size = 2}, [](Communicator& comm) {
    const gpu::Meeting meeting = gpu::meet(
        comm.rank(), 2,
        [&]() -> Driver {
          if (comm.rank() == 1) throw Error(ErrorKind::kSystem, "no device");
          return make_host_driver(0, 8);
        },
        kSmall, exchange_over(comm));
    require(meeting.why_not == "rank 1: no device", meeting.why_not);
  }));
}

TEST_CASE("a late rank is named, and the group's later calls say why they fail") {
  with_groups(3, [](gpu::Group& group, Communicator& comm) {
    std::array<float, 10> data{};
    const Block block{reinterpret_cast<std::byte*>(data.data()), sizeof data};
    if (comm.rank() != 2) {
      const std::string text = outcome(group, sum_of(block, std::chrono::milliseconds(60)));
      const bool told = has(text, "all_reduce(SUM, 10 x float32) on rank") &&
                        has(text, "(call 1 on GPUs)") &&
                        (has(text, "after 0.1 s of waiting for rank 2, which has not come") ||
                         has(text, "has given the group up"));
      require(told, text);
      const std::string again = outcome(group, sum_of(block));
      require(has(again, "takes no more tensors on GPUs: all_reduce(SUM"), again);
    }
    comm.run(Request{});
  });
}

TEST_CASE("different GPU calls are told, and move nothing") {
  std::atomic<int> found{0};
  with_groups(2, [&](gpu::Group& group, Communicator& comm) {
    std::vector<float> data(comm.rank() == 0 ? 10 : 11, 1.0F);
    const Block block{reinterpret_cast<std::byte*>(data.data()), data.size() * sizeof(float)};
    const std::string text = outcome(group, sum_of(block));
    if (has(text, "made another call")) ++found;
    const char* const theirs = comm.rank() == 0 ? "rank 1 made another call: all_reduce(SUM, 11 x"
                                                : "rank 0 made another call: all_reduce(SUM, 10 x";
    require(has(text, theirs) || has(text, "has given the group up"), text);
    for (const float value : data) require(value == 1.0F, "data was moved");
    comm.run(Request{});
  });
  CHECK(found >= 1);
}

TEST_CASE("abort ends a GPU group's waiting call on all ranks") {
  with_groups(2, [](gpu::Group& group, Communicator& comm) {
    std::array<float, 10> data{};
    const Block block{reinterpret_cast<std::byte*>(data.data()), sizeof data};
    if (comm.rank() == 0) {
      std::jthread later([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));  // the call has begun
        group.abort();
      });
      const std::string text = outcome(group, sum_of(block));
      require(has(text, "was ended by abort()") || has(text, "abort() was called"), text);
    }
    comm.run(Request{});
    if (comm.rank() == 1) {
      const std::string text = outcome(group, sum_of(block));
      require(has(text, "rank 0 has given the group up"), text);
    }
    comm.run(Request{});
  });
}

TEST_CASE("a GPU group's errors tell what the host knows of its ranks") {
  with_groups(2, [](gpu::Group& group, Communicator& comm) {
    std::array<float, 10> data{};
    const Block block{reinterpret_cast<std::byte*>(data.data()), sizeof data};
    std::atomic<bool> ended{false};
    group.speak_of("here: ",
                   {.lost = [&] { return ended ? "the process of rank 1 has ended" : ""; },
                    .does = [](int rank) { return concat("rank ", rank, " sleeps"); }});
    if (comm.rank() == 0) {
      std::jthread later([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));  // the call has begun
        ended = true;
        group.abort();
      });
      const std::string text = outcome(group, sum_of(block));
      const bool waited = has(text,
                              "here: all_reduce(SUM, 10 x float32) on rank 0 of 2 (call 1 on GPUs) "
                              "cannot finish: the process of rank 1 has ended");
      // Or the end has come before the call.
      require(waited || has(text, "takes no more tensors on GPUs: the process of rank 1 has ended"),
              text);
      ended = false;
      require(!waited || group.failure().value().what() == text, "a failure's words have changed");
    }
    comm.run(Request{});
  });
  with_groups(2, [](gpu::Group& group, Communicator& comm) {
    std::array<float, 10> data{};
    const Block block{reinterpret_cast<std::byte*>(data.data()), sizeof data};
    group.speak_of("", {.does = [](int rank) { return concat("rank ", rank, " sleeps"); }});
    if (comm.rank() == 0) {
      const std::string text = outcome(group, sum_of(block, std::chrono::milliseconds(50)));
      require(has(text, "rank 1, which has not come to this call; rank 1 sleeps"), text);
    }
    comm.run(Request{});
  });
}

TEST_CASE("calls that went well stay so when a GPU group is ended") {
  with_groups(2, [](gpu::Group& group, Communicator& comm) {
    std::array<float, 10> data{};
    const Block block{reinterpret_cast<std::byte*>(data.data()), sizeof data};
    require(outcome(group, sum_of(block)).empty(), "the call failed");
    comm.run(Request{});
    group.abort();
    require(!group.failure_of_calls(), "a call that went well is told as failed");
    require(has(group.failure().value().what(), "abort() was called"), "nothing is told");
    comm.run(Request{});
  });
}

TEST_CASE("a GPU group tells other hosts whether it has failed, and fails when they have") {
  with_groups(2, [](gpu::Group& group, Communicator& comm) {
    std::vector<float> data(4);
    const Block block{reinterpret_cast<std::byte*>(data.data()), data.size() * sizeof(float)};
    std::uint64_t own = 1;
    group.run(sum_of(block), nullptr);
    group.put_verdict(reinterpret_cast<std::byte*>(&own), nullptr);
    require(own == 0, "a call that went well failed");
    std::uint64_t theirs = 0;
    group.take_verdict(reinterpret_cast<std::byte*>(&theirs), nullptr);
    require(!group.failure(), "a call that went well elsewhere failed");
    comm.run(Request{});  // a barrier: the peer may still be in the call
    theirs = 1;
    group.take_verdict(reinterpret_cast<std::byte*>(&theirs), nullptr);
    require(has(group.failure().value().what(), "a rank of another host"), "no word of it");
    require(has(outcome(group, sum_of(block)), "takes no more tensors"), "a call after it");
  });
  with_groups(2, [](gpu::Group& group, Communicator& comm) {
    std::vector<float> data(4);
    const Block block{reinterpret_cast<std::byte*>(data.data()), data.size() * sizeof(float)};
    Request request = sum_of(block);
    if (comm.rank() == 1) request.reduction.op = ReduceOp::kMax;
    outcome(group, request);
    std::uint64_t own = 0;
    group.put_verdict(reinterpret_cast<std::byte*>(&own), nullptr);
    require(own != 0, "a mismatch is not told");
  });
}

TEST_CASE("a GPU group whose device is lost keeps its memory on all ranks") {
  const int before = host_memory_in_use();
  CHECK_NOTHROW(run_ranks({.size = 2}, [](Communicator& comm) {
    const gpu::Exchange exchange = exchange_over(comm);
    const gpu::Meeting meeting = gpu::meet(
        comm.rank(), 2,
        [&] { return make_host_driver(0, 8, {.drains = comm.rank() == 0 ? -1 : 1}); }, kSmall,
        exchange);
    require(meeting.group != nullptr, meeting.why_not);
    meeting.group->close(exchange);
  }));
  CHECK(host_memory_in_use() == before + 6);  // a window, rounds and what the host is told, each
}

TEST_CASE("GPU tensors in pieces are refused, and harm nothing") {
  with_groups(2, [](gpu::Group& group, Communicator& comm) {
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

TEST_CASE("GPU blocks of no bytes lie nowhere") {
  with_groups(2, [](gpu::Group& group, Communicator& comm) {
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

TEST_CASE("small GPU sums go in one shot, large ones in two") {
  const auto row = [](std::size_t bytes, int size) {
    return gpu::choose({.kind = Kind::kAllReduce, .bytes = bytes, .size = size, .most_blocks = 64})
        .row;
  };
  for (const int size : {2, 4, 8}) {
    CHECK(row(1024, size) == gpu::RowId::kStaged);
    CHECK(row(std::size_t{256} << 20, size) == gpu::RowId::kTwoShot);
  }
  const auto blocks = [](Kind kind, std::size_t bytes) {
    return gpu::choose({.kind = kind, .bytes = bytes, .size = 2, .most_blocks = 64}).grid.blocks;
  };
  CHECK(blocks(Kind::kAllReduce, 1024) == 1);
  CHECK(blocks(Kind::kAllReduce, std::size_t{1} << 30) == 64);
  CHECK(blocks(Kind::kAllToAll, 0) == 64);
}

TEST_CASE("all_reduce on GPUs goes by the algorithm that is asked for") {
  const auto row = [](const char* algorithm, bool fixed_order, bool registered = false) {
    return gpu::choose({.kind = Kind::kAllReduce,
                        .bytes = 1 << 20,
                        .size = 4,
                        .most_blocks = 8,
                        .registered = registered,
                        .asked = gpu::row_asked(algorithm, fixed_order)})
        .row;
  };
  CHECK(row("one_shot", true) == gpu::RowId::kStaged);
  CHECK(row("direct", true) == gpu::RowId::kTwoShot);
  CHECK(row("ring", true) == row("auto", true));
  CHECK(row("ring", false) == gpu::RowId::kRing);
  CHECK(row("heap", true) != gpu::RowId::kPush);
  CHECK(row("heap", true, true) == gpu::RowId::kPush);
  with_groups(
      3,
      [](gpu::Group& group, Communicator& comm) {
        require(has(group.explain(Kind::kAllReduce, 1 << 20), "there: ring by 3 blocks, expected"),
                group.explain(Kind::kAllReduce, 1 << 20));
        run_case_by(
            {.kind = Kind::kAllReduce, .dtype = DType::kInt32, .op = ReduceOp::kSum, .count = 999},
            comm.rank(), 3, [&](const Request& request) { run_on(group, request); });
      },
      {.page_bytes = 512, .most_blocks = 3, .lanes = 3, .asked = gpu::RowId::kRing});
}

TEST_CASE("large GPU calls of ranks with registered memory are made in place") {
  const auto row = [](Kind kind, std::size_t bytes) {
    return gpu::choose(
               {.kind = kind, .bytes = bytes, .size = 4, .most_blocks = 64, .registered = true})
        .row;
  };
  const std::size_t large = std::size_t{64} << 20;
  CHECK(row(Kind::kAllReduce, large) == gpu::RowId::kPush);
  CHECK(row(Kind::kReduce, large) == gpu::RowId::kPush);
  CHECK(row(Kind::kReduceScatter, large) == gpu::RowId::kInPlace);
  CHECK(row(Kind::kAllGather, large) == gpu::RowId::kInPlace);
  CHECK(row(Kind::kBroadcast, large) == gpu::RowId::kInPlace);
  CHECK(row(Kind::kAllReduce, 1024) == gpu::RowId::kStaged);
  CHECK(row(Kind::kAllGather, 1024) == gpu::RowId::kStaged);
}

/// Some ranks' tensors in registered memory, and everybody's sometimes.
TEST_CASE("GPU groups carry out calls of all kinds on registered memory") {
  gpu::GroupOptions options = kSmall;
  options.heap_bytes = std::size_t{4} << 20;
  options.costs.turn = 1e-15;  // in place from a few bytes on
  const int before = host_calls_in_place();
  for (const int size : {1, 2, 3, 4}) {
    CAPTURE(size);
    with_groups(
        size,
        [](gpu::Group& group, Communicator& comm) {
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
  gpu::GroupOptions options = kSmall;
  options.heap_bytes = 1024;
  std::array<std::shared_ptr<std::byte>, 2> held;
  CHECK_NOTHROW(run_ranks({.size = 2}, [&](Communicator& comm) {
    const gpu::Exchange exchange = exchange_over(comm);
    gpu::Meeting meeting =
        gpu::meet(comm.rank(), 2, [&] { return make_host_driver(0, 8); }, options, exchange);
    require(meeting.group != nullptr, meeting.why_not);
    held[static_cast<std::size_t>(comm.rank())] = meeting.group->heap();
    meeting.group->close(exchange);
  }));
  CHECK(host_memory_in_use() == before + 2);
  for (const auto& memory : held) std::fill_n(memory.get(), options.heap_bytes, std::byte{1});
  held = {};
  CHECK(host_memory_in_use() == before);
}

}  // namespace
}  // namespace dreamcomm::testing
