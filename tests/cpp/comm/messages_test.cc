// send and recv: matching, order, sizes, any source, and what goes wrong.
#include <doctest.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <numeric>
#include <random>

#include "comm/p2p/completion.h"
#include "cpp/support/calls.h"
#include "cpp/support/ranks.h"

namespace dreamcomm::testing {
namespace {

using Tickets = std::vector<std::shared_ptr<Completion>>;

Clock::time_point in(std::chrono::milliseconds time) { return Clock::now() + time; }
Clock::time_point soon() { return in(std::chrono::seconds(60)); }

Block block_of(Bytes& bytes) { return {bytes.data(), bytes.size()}; }

Bytes message(std::size_t bytes, int from, int to, int number) {
  return make_block(DType::kUInt8, bytes, from * 16 + to, 0, number);
}

ErrorKind kind_of(const std::function<void()>& run) {
  try {
    run();
  } catch (const Error& error) {
    return error.kind();
  }
  throw std::runtime_error("expected an error");
}

void for_each_transport(const std::vector<int>& worlds,
                        const std::function<void(Communicator&)>& body) {
  for (const Transport transport : transports()) {
    for (const int size : worlds) {
      const Setup setup{
          .transport = transport, .size = size, .message_bytes = 1024, .start = 0xFFFFFFFAU};
      CAPTURE(setup);
      CHECK_NOTHROW(run_ranks(setup, body));
    }
  }
}

constexpr std::array<std::size_t, 8> kSizes{0, 1, 999, 1000, 1001, 2048, 5000, 100000};

TEST_CASE("messages of all sizes arrive, both ways at once") {
  for_each_transport({2, 3, 4}, [](Communicator& comm) {
    for (const std::size_t size : kSizes) {
      std::vector<Bytes> got(static_cast<std::size_t>(comm.size()), Bytes(size));
      std::vector<Bytes> sent;
      Tickets tickets;
      for (int peer = 0; peer < comm.size(); ++peer) {
        sent.push_back(message(size, comm.rank(), peer, 1));
      }
      for (int peer = 0; peer < comm.size(); ++peer) {
        if (peer == comm.rank()) continue;
        const auto p = static_cast<std::size_t>(peer);
        tickets.push_back(comm.send(block_of(sent[p]), peer, 3, soon()));
        tickets.push_back(comm.receive(block_of(got[p]), peer, 3, soon()));
      }
      for (const auto& completion : tickets) comm.wait(*completion);
      for (int peer = 0; peer < comm.size(); ++peer) {
        if (peer == comm.rank()) continue;
        require(got[static_cast<std::size_t>(peer)] == message(size, peer, comm.rank(), 1),
                concat("message of ", size, " bytes from ", peer, " has other bytes"));
      }
    }
  });
}

TEST_CASE("a message that no receive matches yet blocks none behind it") {
  for_each_transport({2}, [](Communicator& comm) {
    constexpr int kMessages = 100;  // more than there are places for
    std::vector<Bytes> data;
    for (int i = 0; i < kMessages; ++i) {
      data.push_back(comm.rank() == 0 ? message(3000, 0, 1, i) : Bytes(3000));
    }
    Tickets tickets;
    for (int i = 0; i < kMessages; ++i) {
      const int tag = comm.rank() == 0 ? i : kMessages - 1 - i;  // received backwards
      Bytes& bytes = data[static_cast<std::size_t>(tag)];
      if (comm.rank() == 0) {
        tickets.push_back(comm.send(block_of(bytes), 1, static_cast<std::uint64_t>(tag), soon()));
      } else {
        comm.wait(*comm.receive(block_of(bytes), 0, static_cast<std::uint64_t>(tag), soon()));
        require(bytes == message(3000, 0, 1, tag), concat("tag ", tag));
      }
    }
    for (const auto& completion : tickets) comm.wait(*completion);
  });
}

TEST_CASE("equal tags arrive in the order sent, from any source too") {
  for_each_transport({3}, [](Communicator& comm) {
    constexpr int kMessages = 50;
    for (const std::size_t size : {8U, 3000U}) {
      for (int i = 0; comm.rank() != 0 && i < kMessages; ++i) {
        Bytes bytes = message(size, comm.rank(), 0, i);
        comm.wait(*comm.send(block_of(bytes), 0, size, soon()));
      }
      std::array<int, 3> next{};
      for (int i = 0; comm.rank() == 0 && i < 2 * kMessages; ++i) {
        Bytes got(size);
        const auto completion = comm.receive(block_of(got), std::nullopt, size, soon());
        comm.wait(*completion);
        const int source = completion->source();
        require(source == 1 || source == 2, concat("source ", source));
        const int number = next[static_cast<std::size_t>(source)]++;
        require(got == message(size, source, 0, number), concat("message ", number));
      }
    }
  });
}

TEST_CASE("messages move while the ranks are in collectives") {
  for_each_transport({2, 4}, [](Communicator& comm) {
    const int right = (comm.rank() + 1) % comm.size();
    const int left = (comm.rank() + comm.size() - 1) % comm.size();
    for (int i = 0; i < 20; ++i) {
      Bytes out = message(20000, comm.rank(), right, i);
      Bytes got(20000);
      const auto receiving = comm.receive(block_of(got), left, 1, soon());
      if (comm.rank() % 2 == 0)
        run_case(comm, {Kind::kAllReduce, DType::kInt32, ReduceOp::kSum, 50});
      const auto sending = comm.send(block_of(out), right, 1, soon());
      if (comm.rank() % 2 == 1)
        run_case(comm, {Kind::kAllReduce, DType::kInt32, ReduceOp::kSum, 50});
      comm.wait(*sending);
      comm.wait(*receiving);
      require(got == message(20000, left, comm.rank(), i), "other bytes");
    }
  });
}

TEST_CASE("a receive of another size fails on both sides and harms nothing") {
  for_each_transport({2}, [](Communicator& comm) {
    Bytes small(8);
    Bytes large(4000);
    if (comm.rank() == 0) {
      const auto refused = comm.send(block_of(large), 1, 0, soon());
      CHECK(kind_of([&] { comm.wait(*refused); }) == ErrorKind::kMismatch);
    } else {
      const auto wrong = comm.receive(block_of(small), 0, 0, soon());
      require(kind_of([&] { comm.wait(*wrong); }) == ErrorKind::kMismatch, "wrong kind");
    }
    run_case(comm, {Kind::kAllReduce, DType::kInt32, ReduceOp::kSum, 10});
    Bytes next = comm.rank() == 0 ? message(4000, 0, 1, 2) : Bytes(4000);
    comm.wait(comm.rank() == 0 ? *comm.send(block_of(next), 1, 0, soon())
                               : *comm.receive(block_of(next), 0, 0, soon()));
    require(next == message(4000, 0, 1, 2), "other bytes");
  });
}

TEST_CASE("an unmatched receive times out and the group stays usable") {
  for_each_transport({2}, [](Communicator& comm) {
    Bytes got(8);
    if (comm.rank() == 1) {
      const auto completion = comm.receive(block_of(got), 0, 9, in(std::chrono::milliseconds(50)));
      require(kind_of([&] { comm.wait(*completion); }) == ErrorKind::kTimeout, "wrong kind");
    }
    run_case(comm, {Kind::kAllReduce, DType::kInt32, ReduceOp::kSum, 10});
  });
}

TEST_CASE("random messages under random delays") {
  for_each_transport({2, 4}, [](Communicator& comm) {
    std::mt19937 random(7);  // the same plan on every rank
    for (int round = 0; round < 30; ++round) {
      struct Plan {
        int from, to;
        std::size_t bytes;
        std::uint64_t tag;
      };
      std::vector<Plan> plan;
      for (int i = 0; i < 40; ++i) {
        const int from = static_cast<int>(random() % static_cast<unsigned>(comm.size()));
        const int step = 1 + static_cast<int>(random() % static_cast<unsigned>(comm.size() - 1));
        plan.push_back(
            {from, (from + step) % comm.size(), random() % 6000, static_cast<std::uint64_t>(i)});
      }
      Tickets tickets;
      std::vector<std::unique_ptr<Bytes>> memory;
      std::vector<std::pair<Bytes*, Bytes>> expected;
      for (const Plan& one : plan) {
        const bool sends = one.from == comm.rank();
        if (!sends && one.to != comm.rank()) continue;
        const Bytes bytes = message(one.bytes, one.from, one.to, round);
        memory.push_back(std::make_unique<Bytes>(sends ? bytes : Bytes(one.bytes)));
        pause(100);
        if (sends) {
          tickets.push_back(comm.send(block_of(*memory.back()), one.to, one.tag, soon()));
        } else {
          tickets.push_back(comm.receive(block_of(*memory.back()), one.from, one.tag, soon()));
          expected.emplace_back(memory.back().get(), bytes);
        }
      }
      for (const auto& completion : tickets) comm.wait(*completion);
      for (const auto& [got, want] : expected) require(*got == want, "other bytes");
    }
  });
}

}  // namespace
}  // namespace dreamcomm::testing
