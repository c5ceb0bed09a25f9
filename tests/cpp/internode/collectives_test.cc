// Collectives of multi-node groups: nodes of threads, and a link of threads between them.
#include <doctest.h>

#include <algorithm>
#include <array>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "cpp/support/calls.h"
#include "cpp/support/hosts.h"
#include "cpp/support/ranks.h"
#include "internode/hier_communicator.h"
#include "transport/window.h"

namespace dreamcomm {
namespace {

using testing::Case;
using testing::Hosts;
using testing::kPlaces;
using testing::require;
using testing::run_hosts;

void run_spanning(Communicator& host, HierarchicalCommunicator& hier, const Case& one, int rank) {
  testing::run_case_by(one, rank, hier.topology().size(), [&](const Request& request) {
    host.run_in_turn([&] { hier.run_ordered(request); });
  });
}

constexpr Kind kAll[] = {Kind::kBarrier, Kind::kBroadcast,     Kind::kAllReduce,
                         Kind::kReduce,  Kind::kAllGather,     Kind::kGather,
                         Kind::kScatter, Kind::kReduceScatter, Kind::kAllToAll};

bool reduces(Kind kind) {
  return kind == Kind::kAllReduce || kind == Kind::kReduce || kind == Kind::kReduceScatter;
}

TEST_CASE("every collective, in every placement of ranks") {
  for (const Hosts& hosts : kPlaces) {
    run_hosts(hosts, [&](Communicator& host, HierarchicalCommunicator& hier, int rank) {
      int salt = 0;
      for (const std::size_t count : {0U, 1U, 3U, 1000U, 6000U}) {
        for (const Kind kind : kAll) {
          for (const int root : {0, hier.topology().size() - 1}) {
            const ReduceOp op = reduces(kind) ? ReduceOp::kSum : ReduceOp::kNone;
            run_spanning(host, hier,
                         {.kind = kind,
                          .op = op,
                          .count = count,
                          .root = root,
                          .salt = ++salt,
                          .in_place = salt % 2 == 0,
                          .hosts = &hosts},
                         rank);
          }
        }
      }
    });
  }
}

TEST_CASE("every type and operation") {
  constexpr DType kTypes[] = {DType::kUInt8,   DType::kInt32,    DType::kInt64,
                              DType::kFloat16, DType::kBFloat16, DType::kFloat32,
                              DType::kFloat64, DType::kBool,     DType::kComplex64};
  constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kAvg,  ReduceOp::kProduct,
                               ReduceOp::kMin, ReduceOp::kMax,  ReduceOp::kBand,
                               ReduceOp::kBor, ReduceOp::kBxor, ReduceOp::kPremulSum};
  const Hosts hosts{{0, 2, 3}, {1, 4}};
  run_hosts(hosts, [&](Communicator& host, HierarchicalCommunicator& hier, int rank) {
    int salt = 0;
    for (const DType dtype : kTypes) {
      for (const ReduceOp op : kOps) {
        if (!is_defined(op, dtype)) continue;
        for (const Kind kind : {Kind::kAllReduce, Kind::kReduce, Kind::kReduceScatter}) {
          for (const std::size_t count : {5U, 9'003U}) {
            run_spanning(host, hier,
                         {.kind = kind,
                          .dtype = dtype,
                          .op = op,
                          .count = count,
                          .root = 3,
                          .salt = ++salt,
                          .hosts = &hosts},
                         rank);
          }
        }
      }
    }
  });
}

TEST_CASE("many chunks under way") {
  const Hosts hosts{{0, 1}, {2, 3}, {4}};
  run_hosts(hosts, [&](Communicator& host, HierarchicalCommunicator& hier, int rank) {
    for (const Kind kind : kAll) {
      const ReduceOp op = reduces(kind) ? ReduceOp::kSum : ReduceOp::kNone;
      run_spanning(host, hier,
                   {.kind = kind, .op = op, .count = 30'001, .root = 1, .hosts = &hosts}, rank);
    }
  });
}

TEST_CASE("tools see the calls of the group, not their parts") {
  const Hosts hosts{{0, 2}, {1}};
  run_hosts(hosts, [&](Communicator& host, HierarchicalCommunicator& hier, int rank) {
    const MultiNodeState& shown = host.whole();
    for (const std::size_t count : {10U, 30'001U}) {
      run_spanning(
          host, hier,
          {.kind = Kind::kAllReduce, .op = ReduceOp::kSum, .count = count, .hosts = &hosts}, rank);
      require(shown.calls.bytes.read() == static_cast<std::int64_t>(count * sizeof(float)),
              "the call has other bytes");
    }
    run_spanning(host, hier, {.kind = Kind::kBarrier, .hosts = &hosts}, rank);
    const auto calls = [&](Kind kind) {
      return shown.tallies[static_cast<std::size_t>(kind)].calls.read();
    };
    require(calls(Kind::kAllReduce) == 2 && calls(Kind::kBarrier) == 1, "calls are miscounted");
    require(calls(Kind::kAllGather) == 0 && calls(Kind::kBroadcast) == 0, "parts are counted");
    require(shown.calls.sequence.read() == 3 && shown.calls.inside.read() == 0, "it is in a call");
    require(static_cast<Kind>(shown.calls.before.read()) == Kind::kAllReduce,
            "another call before");
    require(shown.calls.waiting_for.read() == -1, "it waits for a rank");
    require(shown.numbers[0] == (rank == 1 ? 1 : 0), "the host's first rank has another number");
  });
}

TEST_CASE("a carrier of an all_reduce sends 2(H-1)/H of its shard") {
  for (const Hosts& hosts : {Hosts{{0, 1}, {2, 3}}, Hosts{{0}, {1}, {2}, {3}}}) {
    run_hosts(hosts, [&](Communicator& host, HierarchicalCommunicator& hier, int rank) {
      const std::size_t count = 12'288;  // divides evenly
      run_spanning(host, hier, {.kind = Kind::kBarrier, .hosts = &hosts}, rank);
      const std::uint64_t opening =
          (*hier.wire_traffic())[static_cast<std::size_t>(Kind::kBarrier)].sent;
      run_spanning(
          host, hier,
          {.kind = Kind::kAllReduce, .op = ReduceOp::kSum, .count = count, .hosts = &hosts}, rank);
      const WireTraffic all = (*hier.wire_traffic())[static_cast<std::size_t>(Kind::kAllReduce)];
      const std::uint64_t shard = count * 4 / static_cast<std::size_t>(hier.topology().carriers());
      const std::uint64_t others = hosts.size() - 1;
      require(all.sent - opening == 2 * others * shard / hosts.size(), "sent other than expected");
      require(all.received == all.sent, "received other than sent");
    });
  }
}

TEST_CASE("what ranks receive between hosts is what others send them, both ways") {
  for (const Hosts& hosts : {Hosts{{0, 1}, {2, 3}}, Hosts{{0, 1, 2}, {3}}}) {
    for (const std::size_t count : {10U, 30'001U}) {  // by leaders where they can, and by carriers
      std::mutex mutex;
      std::array<WireTraffic, kKinds> sums{};
      run_hosts(hosts, [&](Communicator& host, HierarchicalCommunicator& hier, int rank) {
        for (const Kind kind : kAll) {
          const ReduceOp op = reduces(kind) ? ReduceOp::kSum : ReduceOp::kNone;
          run_spanning(host, hier, {.kind = kind, .op = op, .count = count, .hosts = &hosts}, rank);
        }
        const std::scoped_lock lock(mutex);
        for (std::size_t i = 0; i < sums.size(); ++i) {
          sums[i].sent += (*hier.wire_traffic())[i].sent;
          sums[i].received += (*hier.wire_traffic())[i].received;
        }
      });
      for (const Kind kind : kAll) {
        CAPTURE(name(kind));
        CAPTURE(count);
        const WireTraffic& sum = sums[static_cast<std::size_t>(kind)];
        CHECK(sum.sent > 0);
        CHECK(sum.received == sum.sent);
      }
    }
  }
}

Request float_sum(std::vector<float>& data, Block& block) {
  block = {reinterpret_cast<std::byte*>(data.data()), data.size() * sizeof(float)};
  Request request;
  request.kind = Kind::kAllReduce;
  request.reduction = {.dtype = DType::kFloat32, .op = ReduceOp::kSum};
  request.in = request.out = {&block, 1};
  request.deadline = Clock::now() + std::chrono::seconds(60);
  return request;
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST_CASE("with many ranks, the first is named, and the first whose call differs") {
  Hosts many_ranks(2);
  for (int rank = 0; rank < 24; ++rank) many_ranks[rank < 20 ? 0 : 1].push_back(rank);
  Hosts many_hosts;
  for (int rank = 0; rank < 24; ++rank) many_hosts.push_back({rank});
  for (const Hosts& hosts : {many_ranks, many_hosts}) {
    run_hosts(hosts, [&](Communicator& host, HierarchicalCommunicator& hier, int rank) {
      std::vector<float> data(rank >= 19 ? 8U : 7U, 1);
      Block block;
      const Request request = float_sum(data, block);
      const std::string told =
          error_of([&] { host.run_in_turn([&] { hier.run_ordered(request); }); });
      const std::string want =
          "different calls: rank 0 called all_reduce(SUM, 7 x float32) as call 1 at r0.py:7, rank "
          "19 called all_reduce(SUM, 8 x float32) as call 1 at r19.py:7. No data was moved";
      require(told.find(want) != std::string::npos, concat("'", want, "' not in: ", told));
    });
  }
}

TEST_CASE("a mismatch is reported to all ranks of all hosts, and the group stays usable") {
  for (const int odd : {0, 1, 2, 3}) {  // the rank whose call differs
    for (const std::size_t count : {3U, 10'000U}) {
      const Hosts hosts{{0, 1}, {2, 3}};
      run_hosts(hosts, [&](Communicator& host, HierarchicalCommunicator& hier, int rank) {
        std::vector<float> data(rank == odd ? count + 1 : count, 1);
        Block block;
        const Request request = float_sum(data, block);
        const std::string told =
            error_of([&] { host.run_in_turn([&] { hier.run_ordered(request); }); });
        const auto says = [&](const std::string& text) {
          require(told.find(text) != std::string::npos, concat("'", text, "' not in: ", told));
        };
        says(concat("rank ", odd, " called all_reduce(SUM, ", count + 1,
                    " x float32) as call 1 at r", odd, ".py:7"));
        says(concat("all_reduce(SUM, ", count, " x float32) as call 1 at r"));
        require(std::all_of(data.begin(), data.end(), [](float x) { return x == 1; }),
                "data was moved");
        for (int i = 0; i < 3; ++i) {
          run_spanning(host, hier,
                       {.kind = Kind::kAllReduce,
                        .op = ReduceOp::kSum,
                        .count = 777,
                        .salt = i,
                        .hosts = &hosts},
                       rank);
        }
      });
    }
  }
}

TEST_CASE("blocks of unexpected sizes are reported to all ranks") {
  const Hosts hosts{{0, 1}, {2, 3}};
  for (const int giver : {0, 3}) {
    run_hosts(hosts, [&](Communicator& host, HierarchicalCommunicator& hier, int rank) {
      std::vector<std::byte> in(64), out(64);
      std::vector<Block> ins, outs;
      for (int peer = 0; peer < 4; ++peer) {
        const std::size_t given = rank == giver && peer == 1 ? 5 : 4;
        ins.push_back({in.data() + 8 * peer, given});
        outs.push_back({out.data() + 8 * peer, 4});
      }
      Request request;
      request.kind = Kind::kAllToAll;
      request.in = ins;
      request.out = outs;
      const std::string told =
          error_of([&] { host.run_in_turn([&] { hier.run_ordered(request); }); });
      const std::string wanted = concat("in all_to_all as call 1 rank ", giver,
                                        " gives rank 1 5 bytes, and rank 1 expects 4: rank ");
      require(told.find(wanted) != std::string::npos, told);
      require(
          told.find(concat("rank ", giver, " called at r", giver, ".py:7")) != std::string::npos,
          told);
      run_spanning(host, hier, {.kind = Kind::kAllToAll, .count = 777, .hosts = &hosts}, rank);
    });
  }
}

TEST_CASE("a rank that aborts ends the call on all hosts") {
  const Hosts hosts{{0, 1}, {2, 3}};
  run_hosts(hosts, [&](Communicator& host, HierarchicalCommunicator& hier, int rank) {
    run_spanning(host, hier, {.kind = Kind::kBarrier, .hosts = &hosts}, rank);
    if (rank == 3) {
      hier.abort("it has had enough");
      return;
    }
    std::vector<float> data(10'000);
    Block block;
    const Request request = float_sum(data, block);
    const std::string told =
        error_of([&] { host.run_in_turn([&] { hier.run_ordered(request); }); });
    require(!told.empty(), "the call succeeded");
    const std::string again =
        error_of([&] { host.run_in_turn([&] { hier.run_ordered(request); }); });
    require(!again.empty(), "the next call succeeded");
  });
}

TEST_CASE("a host that does not enter is named at the deadline") {
  const Hosts hosts{{0, 1}, {2, 3}};
  run_hosts(hosts, [&](Communicator& host, HierarchicalCommunicator& hier, int rank) {
    if (rank >= 2) return;
    std::vector<float> data(10);
    Block block;
    Request request = float_sum(data, block);
    request.deadline = Clock::now() + std::chrono::milliseconds(100);
    const std::string told =
        error_of([&] { host.run_in_turn([&] { hier.run_ordered(request); }); });
    require(!told.empty(), "the call succeeded");
    if (rank == 0) {
      require(told.find("rank 2 of host h1 (ranks 2, 3)") != std::string::npos, told);
    }
  });
}

TEST_CASE("all ranks use the costs that one of them has measured") {
  const Hosts hosts{{0, 2}, {1, 3, 4}};
  std::array<LevelCosts, 5> found;
  run_hosts(
      hosts,
      [&](Communicator& host, HierarchicalCommunicator& hier, int rank) {
        hier.tune(Clock::now() + std::chrono::seconds(60), {});
        found[static_cast<std::size_t>(rank)] = hier.costs();
        for (const std::size_t count : {1U, 9'000U, 100'000U, 600'000U}) {
          run_spanning(
              host, hier,
              {.kind = Kind::kAllReduce, .op = ReduceOp::kSum, .count = count, .hosts = &hosts},
              rank);
        }
      },
      64 << 10, nullptr);
  for (const LevelCosts& one : found) {
    CHECK(one.between == found[0].between);
    CHECK(one.here == found[0].here);
  }
  CHECK(found[0].between.latency > 0);
  CHECK(found[0].between.message >= 0);
  CHECK(found[0].between.alone > 0);
  CHECK(found[0].between.byte > 0);
  CHECK(!(found[0].between == WireCosts::fixed()));
}

TEST_CASE("the hosts follow from the memory that ranks can map") {
  const std::vector<std::string> names{"a", "b", "a", "b"};
  const Topology two(std::vector<std::string>{"1010", "0101", "1010", "0101"}, names);
  CHECK(two.words() == "host a (ranks 0, 2), host b (ranks 1, 3)");
  CHECK(two.carriers() == 2);
  CHECK(two.host_of(3) == 1);
  CHECK(two.index_of(3) == 1);
  // One-sided, or not all: no host of three.
  const Topology three(std::vector<std::string>{"1110", "1100", "1010", "0001"}, names);
  CHECK(three.words() == "host a (ranks 0, 1), host a (rank 2), host b (rank 3)");
  CHECK(three.carriers() == 1);
  CHECK(Topology().hosts() == 0);
}

}  // namespace
}  // namespace dreamcomm
