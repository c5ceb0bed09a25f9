// Errors and their texts: mismatch, lateness, death, abort.
#include <doctest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <future>
#include <memory>
#include <thread>

#include "core/flag.h"
#include "cpp/support/calls.h"
#include "cpp/support/expected_errors.h"
#include "cpp/support/ranks.h"
#include "cpp/support/shared_between_processes.h"

namespace dreamcomm::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

void run_until(Communicator& comm, Clock::time_point deadline) {
  Bytes data(400);
  const Block block{data.data(), data.size()};
  Request request;
  request.kind = Kind::kAllReduce;
  request.reduction = {DType::kFloat32, ReduceOp::kSum};
  request.in = {&block, 1};
  request.out = {&block, 1};
  request.deadline = deadline;
  comm.run(request);
}

/// The error of a rank that enters a call after a peer has aborted the group. The peer's part of
/// the aborted call may be there already: then only the next call fails.
Caught failure_after(Communicator& comm) {
  return caught([&] {
    for (int i = 0; i < 2; ++i) run_until(comm, Clock::now() + seconds(60));
  });
}

TEST_CASE("different calls raise on every rank, naming both, and harm nothing") {
  for (const int size : {2, 4}) {
    on_each_transport(size, [](Communicator& comm) {
      for (int round = 0; round < 3; ++round) {
        Case wrong = kSum;
        if (comm.rank() == comm.size() - 1) {
          if (round == 0) wrong.count = 99;
          if (round == 1) wrong.op = ReduceOp::kMax;
          if (round == 2) wrong.kind = Kind::kBroadcast, wrong.op = ReduceOp::kNone;
        }
        const auto error = caught([&] { run_case(comm, wrong); });
        const std::string other = round == 0 ? "99 x float32" : round == 1 ? "MAX" : "broadcast";
        expect(error, ErrorKind::kMismatch, {"all_reduce(SUM, 100 x float32", other});
        run_case(comm, kSum);
      }
    });
  }
}

TEST_CASE("all_to_all whose splits contradict each other raises on every rank") {
  on_each_transport(3, [](Communicator& comm) {
    std::vector<Bytes> memory(6, Bytes(64));
    std::vector<Block> in, out;
    for (int peer = 0; peer < 3; ++peer) {
      const auto p = static_cast<std::size_t>(peer);
      in.push_back({memory[p].data(), comm.rank() == 1 && peer == 2 ? 8U : 16U});
      out.push_back({memory[p + 3].data(), 16});
    }
    Request request;
    request.kind = Kind::kAllToAll;
    request.in = in;
    request.out = out;
    expect(caught([&] { comm.run(request); }), ErrorKind::kMismatch,
           {"in all_to_all as call 1 rank 1 gives rank 2 8 bytes", "rank 2 expects 16"});
    run_case(comm, kSum);
  });
}

TEST_CASE("bad requests are refused before anything is sent") {
  on_each_transport(2, [](Communicator& comm) {
    Bytes data(16);
    const Block block{data.data(), data.size()};
    using Blocks = std::span<const Block>;
    const Blocks one(&block, 1);
    const auto refused = [&](Kind kind, Reduction how, Blocks in, Blocks out, int root,
                             const std::vector<std::string>& words) {
      Request request;
      request.kind = kind;
      request.reduction = how;
      request.in = in;
      request.out = out;
      request.root = root;
      expect(caught([&] { comm.run(request); }), ErrorKind::kInvalid, words);
    };
    const Reduction sum{DType::kFloat32, ReduceOp::kSum};
    const Reduction band{DType::kFloat32, ReduceOp::kBand};
    refused(Kind::kBroadcast, sum, one, one, 5, {"broadcast", "root is 5", "0 to 1"});
    refused(Kind::kAllReduce, sum, {}, one, 0, {"0 input", "expected 1"});
    refused(Kind::kAllReduce, band, one, one, 0, {"BAND", "float32"});
    refused(Kind::kReduceScatter, sum, one, one, 0, {"expected 2"});
    run_case(comm, kSum);
  });
}

TEST_CASE("a late rank is named at the deadline, with what it last did") {
  on_each_transport(3, [](Communicator& comm) {
    run_case(comm, {.kind = Kind::kBarrier});
    if (comm.rank() == 2) {  // late: enters when the others have aborted
      expect(wait_for_end_of(comm, 0), ErrorKind::kPeerLost, {"rank 0 has aborted the group"});
      expect(wait_for_end_of(comm, 1), ErrorKind::kPeerLost, {"rank 1 has aborted the group"});
      expect(failure_after(comm), ErrorKind::kPeerLost, {"has aborted the group", "timeout"});
      return;
    }
    const auto error = caught([&] { run_until(comm, Clock::now() + milliseconds(100)); });
    if (error.kind == ErrorKind::kTimeout) {
      expect(error, ErrorKind::kTimeout, {"for rank", "all_reduce(SUM, 100 x float32)"});
    } else {  // the other rank was earlier and has reported it
      expect(error, ErrorKind::kPeerLost, {"rank 2", "last called barrier as call 1"});
    }
    expect(caught([&] { run_case(comm, kSum); }), ErrorKind::kAborted, {"unusable", "Destroy"});
  });
}

TEST_CASE("a rank that leaves is named, and what it published before still counts") {
  on_each_transport(3, [](Communicator& comm) {
    run_case(comm, kSum);
    if (comm.rank() == 1) return;
    const auto error = caught([&] { run_until(comm, Clock::now() + seconds(30)); });
    expect(error, ErrorKind::kPeerLost, {"rank 1"});
  });
}

TEST_CASE("a rank that is killed is noticed at once") {
  for (const Transport transport : transports()) {
    if (transport == Transport::kLocal) continue;  // a thread cannot die alone
    const Setup setup{.transport = transport, .size = 3};
    const auto body = [](Communicator& comm) {
      run_case(comm, kSum);
      if (comm.rank() == 2) _exit(9);
      const auto begin = Clock::now();
      Bytes data(8);
      const auto completion = comm.receive({data.data(), 8}, 2, 0, Clock::now() + seconds(60));
      expect(caught([&] { comm.wait(*completion); }), ErrorKind::kPeerLost, {"rank 2", "ended"});
      expect(caught([&] { run_until(comm, Clock::now() + seconds(60)); }), ErrorKind::kPeerLost,
             {"rank"});
      require(Clock::now() - begin < seconds(30), "only the deadline ended the wait");
    };
    CHECK_NOTHROW(run_ranks(setup, body, {2}));
  }
}

/// As the kernel does for a process that ends, some time before it reports the end.
void cut_all_lines() {
  for (int file = 3; file < 1024; ++file) shutdown(file, SHUT_RDWR);
}

TEST_CASE("a rank has ended as soon as errors say so") {
  const Setup setup{.transport = Transport::kShm, .size = 3, .page_bytes = tiny_page(3)};
  const auto looked = shared_between_processes<Gauge>();
  const auto wait = [&] {
    const Clock::time_point end = Clock::now() + seconds(60);
    while (looked->read() < 2 && Clock::now() < end) std::this_thread::sleep_for(milliseconds(1));
  };
  const auto body = [&](Communicator& comm) {
    run_case(comm, kSum);
    if (comm.rank() == 2) {
      cut_all_lines();
      wait();
      _exit(0);
    }
    expect(failure_after(comm), ErrorKind::kPeerLost, {"the process of rank 2 has ended"});
    const bool told = comm.has_ended(2);
    const bool of_another = comm.has_ended(1 - comm.rank());
    looked->add(1);
    wait();
    require(told, "it has not ended");
    require(!of_another, "a rank that lives has ended");
  };
  CHECK_NOTHROW(run_ranks(setup, body, {2}));
}

TEST_CASE("abort from another thread releases every waiter") {
  on_each_transport(2, [](Communicator& comm) {
    if (comm.rank() == 1) {
      expect(wait_for_end_of(comm, 0), ErrorKind::kPeerLost, {"enough"});
      expect(failure_after(comm), ErrorKind::kPeerLost, {"enough"});
      return;
    }
    Bytes data(8);
    const auto completion = comm.receive({data.data(), 8}, 1, 0, Clock::now() + seconds(60));
    auto waiting = std::async(std::launch::async, [&] { return failure_after(comm); });
    std::this_thread::sleep_for(milliseconds(50));
    comm.abort("enough");
    const Caught error = waiting.get();
    expect(error, ErrorKind::kAborted, {"enough"});
    expect(caught([&] { comm.wait(*completion); }), ErrorKind::kAborted, {"enough"});
  });
}

TEST_CASE("an interrupt ends a wait") {
  on_each_transport(2, [](Communicator& comm) {
    struct Stop {};
    if (comm.rank() == 0) {
      int looks = 0;
      bool stopped = false;
      Bytes data(400);
      const Block block{data.data(), data.size()};
      Request request;
      request.kind = Kind::kAllReduce;
      request.reduction = {DType::kFloat32, ReduceOp::kSum};
      request.in = {&block, 1};
      request.out = {&block, 1};
      try {
        comm.run(request, [&] {
          if (++looks > 3) throw Stop{};
        });
      } catch (const Stop&) {
        stopped = true;
      }
      require(stopped, "not stopped");
    } else {
      expect(wait_for_end_of(comm, 0), ErrorKind::kPeerLost, {"interrupted"});
      expect(failure_after(comm), ErrorKind::kPeerLost, {"interrupted"});
    }
  });
}

}  // namespace
}  // namespace dreamcomm::testing
