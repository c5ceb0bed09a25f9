// What goes wrong, and in which words: mismatch, lateness, death, abort.
#include <doctest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <future>
#include <memory>
#include <thread>

#include "calls.h"
#include "comm/ticket.h"
#include "core/flag.h"
#include "ranks.h"

namespace dreamcomm::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

struct Caught {
  ErrorKind kind;
  std::string text;
};

template <typename T>
std::shared_ptr<T> shared_between_processes() {
  void* const memory =
      mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  require(memory != MAP_FAILED, "mmap failed");
  return {new (memory) T(), [](T* at) { munmap(at, sizeof(T)); }};
}

Caught caught(const std::function<void()>& run) {
  try {
    run();
  } catch (const Error& error) {
    return {error.kind(), error.what()};
  }
  throw std::runtime_error("expected an error");
}

void expect(const Caught& error, ErrorKind kind, const std::vector<std::string>& words) {
  require(error.kind == kind, "another kind of error: " + error.text);
  for (const std::string& word : words) {
    require(error.text.find(word) != std::string::npos,
            "'" + word + "' is missing in: " + error.text);
  }
}

void on_each_transport(int size, const std::function<void(Communicator&)>& body,
                       const std::vector<int>& may_die = {}) {
  for (const Transport transport : transports()) {
    const Setup setup{.transport = transport, .size = size, .page_bytes = tiny_page(size)};
    CAPTURE(setup);
    CHECK_NOTHROW(run_ranks(setup, body, may_die));
  }
}

const Case kSum{Kind::kAllReduce, DType::kFloat32, ReduceOp::kSum, 100};

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

/// The error that a rank gets which comes after a peer has given up. The peer's
/// part of the call it gave up may lie there already: then only the next fails.
Caught failure_after(Communicator& comm) {
  return caught([&] {
    for (int i = 0; i < 2; ++i) run_until(comm, Clock::now() + seconds(60));
  });
}

/// Returns when `peer` has given the group up or gone, and says with what words.
Caught wait_for_end_of(Communicator& comm, int peer) {
  Bytes data(8);
  const auto ticket = comm.receive({data.data(), 8}, peer, 77, Clock::now() + seconds(60));
  return caught([&] { comm.wait(*ticket); });
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
           {"rank 1 gives rank 2 8 bytes", "rank 2 expects 16"});
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
    if (comm.rank() == 2) {  // is late: comes when the others have given up
      expect(wait_for_end_of(comm, 0), ErrorKind::kPeerLost, {"rank 0 has given the group up"});
      expect(wait_for_end_of(comm, 1), ErrorKind::kPeerLost, {"rank 1 has given the group up"});
      expect(failure_after(comm), ErrorKind::kPeerLost, {"has given the group up", "timeout"});
      return;
    }
    const auto error = caught([&] { run_until(comm, Clock::now() + milliseconds(100)); });
    if (error.kind == ErrorKind::kTimeout) {
      expect(error, ErrorKind::kTimeout, {"for rank", "all_reduce(SUM, 100 x float32)"});
    } else {  // the other one was earlier and told us
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
      const auto ticket = comm.receive({data.data(), 8}, 2, 0, Clock::now() + seconds(60));
      expect(caught([&] { comm.wait(*ticket); }), ErrorKind::kPeerLost, {"rank 2", "ended"});
      expect(caught([&] { run_until(comm, Clock::now() + seconds(60)); }), ErrorKind::kPeerLost,
             {"rank"});
      require(Clock::now() - begin < seconds(30), "only the deadline ended the wait");
    };
    CHECK_NOTHROW(run_ranks(setup, body, {2}));
  }
}

TEST_CASE("abort from another thread releases every waiter") {
  on_each_transport(2, [](Communicator& comm) {
    if (comm.rank() == 1) {
      expect(wait_for_end_of(comm, 0), ErrorKind::kPeerLost, {"enough"});
      expect(failure_after(comm), ErrorKind::kPeerLost, {"enough"});
      return;
    }
    Bytes data(8);
    const auto ticket = comm.receive({data.data(), 8}, 1, 0, Clock::now() + seconds(60));
    auto waiting = std::async(std::launch::async, [&] { return failure_after(comm); });
    std::this_thread::sleep_for(milliseconds(50));
    comm.abort("enough");
    const Caught error = waiting.get();
    expect(error, ErrorKind::kAborted, {"enough"});
    expect(caught([&] { comm.wait(*ticket); }), ErrorKind::kAborted, {"enough"});
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

TEST_CASE("a monitored barrier names the missing and leaves the group usable") {
  on_each_transport(4, [](Communicator& comm) {
    for (int round = 0; round < 5; ++round) comm.monitored_barrier(seconds(30), false);
    const bool absent = comm.rank() == 1 || comm.rank() == 3;
    if (!absent) {
      const auto timeout = comm.rank() == 0 ? milliseconds(400) : milliseconds(60'000);
      const auto error = caught([&] { comm.monitored_barrier(timeout, true); });
      expect(error, ErrorKind::kTimeout, {"Ranks 1, 3 failed to pass", "400 ms"});
    }
    run_case(comm, kSum);
    comm.monitored_barrier(seconds(30), true);
  });
}

TEST_CASE("a monitored barrier does not wait for a rank that has gone") {
  for (const bool all : {false, true}) {
    on_each_transport(4, [all](Communicator& comm) {
      run_case(comm, kSum);
      if (comm.rank() == 3) return comm.abort("enough");
      if (comm.rank() == 2) {
        wait_for_end_of(comm, 3);
        return comm.shutdown();
      }
      const auto error = caught([&] { comm.monitored_barrier(seconds(60), all); });
      const bool both = all && comm.rank() == 0;
      expect(error, ErrorKind::kPeerLost,
             {"failed to pass monitoredBarrier", "given the group up"});
      if (both) expect(error, ErrorKind::kPeerLost, {"Ranks 2, 3", "rank 2 has left the group"});
    });
  }
}

TEST_CASE("whoever waits in a monitored barrier is told why rank 0 ended it") {
  on_each_transport(3, [](Communicator& comm) {
    if (comm.rank() == 2) {  // does not come
      expect(caught([&] { run_case(comm, kSum); }), ErrorKind::kPeerLost, {"enough"});
      return;
    }
    std::future<void> end;
    if (comm.rank() == 0) {
      end = std::async(std::launch::async, [&comm] {
        std::this_thread::sleep_for(milliseconds(20));
        comm.abort("enough");
      });
    }
    const auto error = caught([&] { comm.monitored_barrier(seconds(60), false); });
    const ErrorKind kind = comm.rank() == 0 ? ErrorKind::kAborted : ErrorKind::kPeerLost;
    expect(error, kind, {"monitored_barrier", "enough"});
  });
}

TEST_CASE("a monitored barrier that failed is not made good by who comes late") {
  for (const bool left_one_out : {false, true}) {
    const auto failed = shared_between_processes<std::array<Flag, 2>>();  // of each transport
    const auto used = shared_between_processes<Flag>();
    on_each_transport(3, [&](Communicator& comm) {
      run_case(comm, kSum);
      Flag& rounds = (*failed)[used->read()];
      comm.monitored_barrier(seconds(60), true);
      const auto miss = [&] {
        const auto error = caught([&] { comm.monitored_barrier(milliseconds(400), false); });
        const bool late = comm.rank() == 1;
        expect(error, ErrorKind::kTimeout, {late ? "came too late" : "Rank 1 failed to pass"});
      };
      if (left_one_out) {
        if (comm.rank() != 1) miss();
        run_case(comm, kSum);
      }
      const Clock::time_point end = Clock::now() + seconds(60);
      if (comm.rank() == 1) {
        while (rounds.read() < 4 && Clock::now() < end) std::this_thread::yield();
        used->publish(1);
      }
      for (int round = 0; round < 2; ++round) {
        miss();
        if (comm.rank() != 1) rounds.take();
      }
      comm.monitored_barrier(seconds(60), true);
    });
  }
}

TEST_CASE("the first timeout of those who hold a monitored barrier ends it for all") {
  on_each_transport(3, [](Communicator& comm) {
    run_case(comm, kSum);
    comm.monitored_barrier(seconds(60), true);
    const Clock::time_point begin = Clock::now();
    if (comm.rank() != 2) {
      const auto timeout = comm.rank() == 1 ? milliseconds(30) : milliseconds(60'000);
      const auto error = caught([&] { comm.monitored_barrier(timeout, true); });
      const bool judges = comm.rank() == 0;  // maybe when rank 1 has given up
      expect(error, ErrorKind::kTimeout, {judges ? "failed to pass" : "onitored"});
      require(Clock::now() - begin < seconds(8), "rank 1's timeout did not end it");
    }
    run_case(comm, kSum);
    comm.monitored_barrier(seconds(60), true);
  });
}

TEST_CASE("where rank 0 dies in a monitored barrier those in it are told at once") {
  const Setup setup{.transport = Transport::kShm, .size = 3, .page_bytes = tiny_page(3)};
  const auto body = [](Communicator& comm) {
    run_case(comm, kSum);
    if (comm.rank() == 2) {  // neither comes nor goes
      expect(wait_for_end_of(comm, 1), ErrorKind::kPeerLost, {});
      return;
    }
    std::thread end;
    if (comm.rank() == 0) {
      end = std::thread([] {
        std::this_thread::sleep_for(milliseconds(50));
        _exit(9);
      });
    }
    const Clock::time_point begin = Clock::now();
    const auto error = caught([&] { comm.monitored_barrier(seconds(60), false); });
    expect(error, ErrorKind::kPeerLost, {"the process of rank 0 has ended"});
    require(Clock::now() - begin < seconds(8), "nobody told of it");
  };
  CHECK_NOTHROW(run_ranks(setup, body, {0}));
}

TEST_CASE("ranks that have left monitored barriers out take part in the next") {
  on_each_transport(4, [](Communicator& comm) {
    for (int round = 0; round < 8; ++round) {
      run_case(comm, kSum);
      const bool absent = comm.rank() == round % 4 || comm.rank() == (round + 1) % 4;
      if (!absent) caught([&] { comm.monitored_barrier(milliseconds(20), true); });
    }
    run_case(comm, kSum);
    comm.monitored_barrier(seconds(60), true);
  });
}

TEST_CASE("a death before the first call is told as rank 0 judges it") {
  on_each_transport(4, [](Communicator& comm) {
    comm.monitored_barrier(seconds(60), true);
    if (comm.rank() == 2) return comm.abort("enough");
    const auto error = caught([&] { comm.monitored_barrier(seconds(60), false); });
    expect(error, ErrorKind::kPeerLost, {"Rank 2 failed to pass"});
  });
}

TEST_CASE("of a batch of ranks each makes many monitored barriers, some late") {
  on_each_transport(3, [](Communicator& comm) {
    for (int round = 0; round < 200; ++round) {
      if (round % 3 == comm.rank()) std::this_thread::sleep_for(milliseconds(round % 2));
      comm.monitored_barrier(seconds(60), round % 2 == 0);
    }
  });
}

}  // namespace
}  // namespace dreamcomm::testing
