// The GPU's kernels, the very source that nvcc compiles, with threads as lanes.
#include <doctest.h>

#include <array>
#include <atomic>
#include <memory>
#include <vector>

#include "cpp/gpu/ranks.h"
#include "cpp/support/calls.h"
#include "cpp/support/ranks.h"

namespace dreamcomm::testing {
namespace {

using gpu::AlgorithmId;

constexpr std::array kWorlds{1, 2, 3, 4, 8};
constexpr std::array kGrids{Way{.blocks = 1, .lanes = 1}, Way{.blocks = 2, .lanes = 4},
                            Way{.blocks = 3, .lanes = 5}};
constexpr std::size_t kTinyPage = 512;  // the sizes of 16 ranks fit, and pieces for 8

constexpr std::array kMoves{Kind::kBarrier, Kind::kBroadcast, Kind::kAllGather,
                            Kind::kGather,  Kind::kScatter,   Kind::kAllToAll};

std::vector<AlgorithmId> rows_of(Kind kind) {
  switch (kind) {
    case Kind::kAllReduce:
      return {AlgorithmId::kStaged, AlgorithmId::kTwoShot, AlgorithmId::kOneShotInPlace,
              AlgorithmId::kPull,   AlgorithmId::kPush,    AlgorithmId::kFlagged};
    case Kind::kReduce:
      return {AlgorithmId::kTwoShot, AlgorithmId::kPush};
    case Kind::kReduceScatter:
    case Kind::kAllGather:
    case Kind::kBroadcast:
      return {AlgorithmId::kStaged, AlgorithmId::kInPlace};
    default:
      return {AlgorithmId::kStaged};
  }
}

void run_rows(Gpus& gpus, Communicator& comm, const Case& one, Way way) {
  for (const AlgorithmId row : rows_of(one.kind)) {
    way.row = row;
    run_case_by(one, comm.rank(), comm.size(),
                [&](const Request& request) { run_well(gpus, comm, request, way); });
  }
}

void run_kinds(Gpus& gpus, Communicator& comm, DType dtype, std::size_t count, int salt,
               Place place, Way way) {
  const int root = salt % comm.size();
  const bool over_itself = salt % 2 == 1;
  for (const Kind kind : kMoves) {
    run_rows(gpus, comm, {kind, dtype, ReduceOp::kNone, count, root, salt, over_itself, place},
             way);
  }
  for (const Kind kind : {Kind::kAllReduce, Kind::kReduce, Kind::kReduceScatter}) {
    const ReduceOp op = salt % 4 == 0 ? ReduceOp::kAvg : ReduceOp::kSum;
    run_rows(gpus, comm, {kind, dtype, op, count, root, salt, over_itself, place}, way);
  }
}

/// Every rank a thread, each with a heap, which counts as registered memory.
void on_gpus(int size, std::size_t page_bytes,
             const std::function<void(Gpus&, Communicator&)>& body, std::uint32_t start = 0) {
  const std::unique_ptr<Gpus> gpus = make_gpus(size, page_bytes, start);
  const Setup setup{.size = size, .heap_bytes = std::size_t{8} << 20};
  run_ranks(setup, [&](Communicator& comm) { body(*gpus, comm); });
}

TEST_CASE("GPU kernels give the right bits") {
  for (const int size : kWorlds) {
    for (const Way& way : kGrids) {
      CAPTURE(size);
      CAPTURE(way.blocks);
      CHECK_NOTHROW(on_gpus(size, kTinyPage, [&](Gpus& gpus, Communicator& comm) {
        int salt = 0;
        for (const std::size_t count : {0, 1, 7, 255, 256}) {
          const DType dtype = ++salt % 2 == 0 ? DType::kBFloat16 : DType::kFloat32;
          run_kinds(gpus, comm, dtype, count, salt, static_cast<Place>(salt % 3), way);
        }
      }));
    }
  }
}

TEST_CASE("GPU kernels compute with every type they know") {
  CHECK_NOTHROW(on_gpus(3, kTinyPage, [](Gpus& gpus, Communicator& comm) {
    int salt = 0;
    for (const DType dtype : {DType::kFloat64, DType::kFloat16, DType::kUInt8, DType::kInt8,
                              DType::kInt16, DType::kInt32, DType::kInt64}) {
      for (const ReduceOp op :
           {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kMax}) {
        run_rows(gpus, comm,
                 {.kind = Kind::kAllReduce, .dtype = dtype, .op = op, .count = 77, .salt = ++salt},
                 {.blocks = 2, .lanes = 3});
      }
    }
  }));
}

TEST_CASE("GPU kernels take tensors that begin anywhere") {
  CHECK_NOTHROW(on_gpus(3, kTinyPage, [](Gpus& gpus, Communicator& comm) {
    const auto n = static_cast<std::size_t>(comm.size());
    // The heaps' tensors begin one element late on rank 1, two on rank 2.
    const std::shared_ptr<std::byte> memory = own_heap()->allocate(4096);
    auto* first = reinterpret_cast<float*>(memory.get()) + comm.rank();
    for (const AlgorithmId row : rows_of(Kind::kAllReduce)) {
      for (std::size_t i = 0; i < 101; ++i) first[i] = static_cast<float>(comm.rank() + 1);
      const Block data{reinterpret_cast<std::byte*>(first), 101 * sizeof(float)};
      Request request;
      request.kind = Kind::kAllReduce;
      request.reduction = {.dtype = DType::kFloat32, .op = ReduceOp::kSum};
      request.in = request.out = std::span(&data, 1);
      run_well(gpus, comm, request, {.row = row, .blocks = 2, .lanes = 3});
      for (std::size_t i = 0; i < 101; ++i) {
        require(first[i] == static_cast<float>(n * (n + 1) / 2), "a wrong sum");
      }
      comm.run(Request{});  // a barrier: nobody rewrites what another still compares
    }
  }));
}

/// Calls of all kinds one after the other, with grids that change, and late lanes.
void run_mixed(Gpus& gpus, Communicator& comm, int calls, int delays) {
  unsigned state = 12345;  // the same on all ranks
  const auto pick = [&](unsigned below) {
    state = state * 1664525U + 1013904223U;
    return static_cast<int>((state >> 16U) % below);
  };
  for (int i = 0; i < calls; ++i) {
    const Kind kind =
        std::array{
            Kind::kAllReduce, Kind::kReduceScatter, Kind::kAllGather,
            Kind::kAllToAll,  Kind::kReduce,        Kind::kBroadcast}[static_cast<std::size_t>(
            pick(6))];
    const bool reduces =
        kind == Kind::kAllReduce || kind == Kind::kReduceScatter || kind == Kind::kReduce;
    const Case one{.kind = kind,
                   .dtype = DType::kFloat32,
                   .op = reduces ? ReduceOp::kSum : ReduceOp::kNone,
                   .count = static_cast<std::size_t>(pick(600)),
                   .root = pick(static_cast<unsigned>(comm.size())),
                   .salt = i,
                   .in_place = pick(2) == 0,
                   .place = static_cast<Place>(pick(3))};
    const std::vector<AlgorithmId> rows = rows_of(kind);
    const AlgorithmId row =
        rows[static_cast<std::size_t>(pick(static_cast<unsigned>(rows.size())))];
    const Way way{.row = row, .blocks = 1 + pick(4), .lanes = 1 + pick(5), .delays = delays};
    run_case_by(one, comm.rank(), comm.size(),
                [&](const Request& request) { run_well(gpus, comm, request, way); });
  }
}

TEST_CASE("GPU calls follow each other with other grids, kinds and paces") {
  for (const int size : {2, 3}) {
    CHECK_NOTHROW(on_gpus(size, kTinyPage,
                          [](Gpus& gpus, Communicator& comm) { run_mixed(gpus, comm, 60, 200); }));
  }
}

TEST_CASE("GPU rounds wrap around") {
  CHECK_NOTHROW(on_gpus(
      3, kTinyPage, [](Gpus& gpus, Communicator& comm) { run_mixed(gpus, comm, 20, 0); },
      0xFFFFFFF0U));
}

TEST_CASE("GPU sums by LL packets: many ranks, full blocks, more than fits") {
  for (const int size : {2, 9, 16}) {
    for (const std::uint32_t start : {0xFFFFFFFDU, 0x7FFFFFFDU}) {
      CHECK_NOTHROW(on_gpus(
          size, kTinyPage,
          [](Gpus& gpus, Communicator& comm) {
            int salt = 0;
            for (const std::size_t count : {3, 1024, 1025, 2048, 2049}) {  // float32
              const Case one{.kind = Kind::kAllReduce,
                             .dtype = DType::kFloat32,
                             .op = ReduceOp::kSum,
                             .count = count,
                             .salt = ++salt,
                             .in_place = salt % 2 == 0};
              run_case_by(one, comm.rank(), comm.size(), [&](const Request& request) {
                run_well(gpus, comm, request,
                         {.row = AlgorithmId::kFlagged, .blocks = 2, .lanes = 3});
              });
            }
          },
          start));
    }
  }
}

TEST_CASE("GPU rings sum in some order") {
  for (const int size : {2, 3, 4}) {
    CHECK_NOTHROW(on_gpus(size, kTinyPage, [](Gpus& gpus, Communicator& comm) {
      for (const std::size_t count : {0, 1, 5, 1000}) {
        // Integers: any order gives the same.
        const Case one{.kind = Kind::kAllReduce,
                       .dtype = DType::kInt32,
                       .op = ReduceOp::kSum,
                       .count = count,
                       .salt = static_cast<int>(count),
                       .in_place = count % 2 == 0};
        run_case_by(one, comm.rank(), comm.size(), [&](const Request& request) {
          run_well(gpus, comm, request, {.row = AlgorithmId::kRing, .blocks = 3, .lanes = 4});
        });
      }
    }));
  }
}

Request sum_of(const Block& data) {
  Request request;
  request.kind = Kind::kAllReduce;
  request.reduction = {.dtype = DType::kFloat32, .op = ReduceOp::kSum};
  request.in = request.out = std::span(&data, 1);
  return request;
}

TEST_CASE("a GPU kernel that waits too long names the rank it waits for") {
  std::atomic<int> alone_found{0};
  CHECK_NOTHROW(on_gpus(3, kTinyPage, [&](Gpus& gpus, Communicator& comm) {
    std::array<float, 50> data{};
    const Block block{reinterpret_cast<std::byte*>(data.data()), sizeof data};
    if (comm.rank() != 1) {  // rank 1 never calls
      const Way way{
          .row = AlgorithmId::kTwoShot, .blocks = 2, .lanes = 3, .patience_ns = 50'000'000};
      const gpu::Report report = gpus.run(comm, sum_of(block), way).report;
      require(report.rank == comm.rank() && report.turn == 0 && report.round == 1, "a wrong place");
      require(report.info.kind == Kind::kAllReduce, "another call");
      const bool alone = report.reason == gpu::Report::kTimeout && report.missing == 1;
      const bool failed =
          report.reason == gpu::Report::kPeerFailed && report.missing == 2 - comm.rank();
      require(alone || failed, "a wrong reason");
      if (alone) ++alone_found;
    }
    comm.run(Request{});
  }));
  CHECK(alone_found >= 1);
}

TEST_CASE("the host ends a GPU kernel, and the peers' with it") {
  CHECK_NOTHROW(on_gpus(3, kTinyPage, [](Gpus& gpus, Communicator& comm) {
    std::array<float, 50> data{};
    const Block block{reinterpret_cast<std::byte*>(data.data()), sizeof data};
    if (comm.rank() == 1) {
      pause(1000);
      gpus.abort(0);
    } else {
      const Way way{.row = AlgorithmId::kStaged, .blocks = 1, .lanes = 2};
      const auto reason =
          static_cast<gpu::Report::Reason>(gpus.run(comm, sum_of(block), way).report.reason);
      const auto expected = comm.rank() == 0 ? gpu::Report::kAborted : gpu::Report::kPeerFailed;
      require(reason == expected, "a wrong reason: " + std::to_string(reason));
    }
    comm.run(Request{});
  }));
}

TEST_CASE("a GPU whose call has failed writes nothing any more") {
  CHECK_NOTHROW(on_gpus(2, kTinyPage, [](Gpus& gpus, Communicator& comm) {
    std::vector<float> data(50, 1.0F);
    const Block block{reinterpret_cast<std::byte*>(data.data()), data.size() * sizeof(float)};
    const Way way{.row = AlgorithmId::kStaged, .blocks = 2, .lanes = 2, .patience_ns = 20'000'000};
    if (comm.rank() == 0) gpus.run(comm, sum_of(block), way);  // nobody comes
    comm.run(Request{});
    // Both ranks make the next call, and rank 1 finds what rank 0 published of the first.
    const gpu::Report report = gpus.run(comm, sum_of(block), way).report;
    const auto reason = static_cast<gpu::Report::Reason>(report.reason);
    require(reason == (comm.rank() == 0 ? gpu::Report::kTimeout : gpu::Report::kPeerFailed),
            "a wrong reason");
    for (const float value : data) require(value == 1.0F, "data was moved");
    comm.run(Request{});
  }));
}

TEST_CASE("GPU kernels of different calls move nothing") {
  for (const AlgorithmId row : {AlgorithmId::kTwoShot, AlgorithmId::kFlagged}) {
    std::atomic<int> found{0};
    CHECK_NOTHROW(on_gpus(3, kTinyPage, [&](Gpus& gpus, Communicator& comm) {
      std::vector<float> data(comm.rank() == 1 ? 40 : 50, 1.0F);
      const Block block{reinterpret_cast<std::byte*>(data.data()), data.size() * sizeof(float)};
      // Rank 1's kernel has other blocks, too, and none of its peers' blocks waits for ever.
      const Way way{.row = row, .blocks = comm.rank() == 1 ? 1 : 3, .lanes = 2};
      const auto reason =
          static_cast<gpu::Report::Reason>(gpus.run(comm, sum_of(block), way).report.reason);
      require(reason == gpu::Report::kMismatch || reason == gpu::Report::kPeerFailed,
              "a wrong reason");
      if (reason == gpu::Report::kMismatch) ++found;
      for (const float value : data) require(value == 1.0F, "data was moved");
      comm.run(Request{});
    }));
    CHECK(found >= 1);  // the others may hear of its end first
  }
}

TEST_CASE("a GPU call that differs is reported, though another rank does not call") {
  CHECK_NOTHROW(on_gpus(3, kTinyPage, [](Gpus& gpus, Communicator& comm) {
    std::vector<float> data(comm.rank() == 2 ? 40 : 50, 1.0F);
    const Block block{reinterpret_cast<std::byte*>(data.data()), data.size() * sizeof(float)};
    if (comm.rank() != 1) {
      const Way way{.row = AlgorithmId::kFlagged, .blocks = 1, .lanes = 2};
      const gpu::Report report = gpus.run(comm, sum_of(block), way).report;
      const bool named = report.reason == gpu::Report::kMismatch ||
                         (report.reason == gpu::Report::kPeerFailed && report.missing != 1);
      require(named, "a wrong reason");
    }
    comm.run(Request{});
  }));
}

TEST_CASE("all_to_all on GPUs finds sizes that do not agree") {
  std::atomic<int> found{0};
  CHECK_NOTHROW(on_gpus(2, kTinyPage, [&](Gpus& gpus, Communicator& comm) {
    std::array<std::byte, 64> in{};
    std::array<std::byte, 64> out{};
    const bool odd = comm.rank() == 0;  // gives rank 1 20 bytes, which expects 24
    const std::array from{Block{in.data(), 8}, Block{in.data() + 8, odd ? 20U : 8U}};
    const std::array to{Block{out.data(), odd ? 8U : 24U}, Block{out.data() + 24, 8}};
    Request request;
    request.kind = Kind::kAllToAll;
    request.in = from;
    request.out = to;
    const gpu::Report report = gpus.run(comm, request, {.blocks = 2, .lanes = 2}).report;
    // A block may see another's failure before it finds the contradiction itself.
    if (report.reason == gpu::Report::kPeerFailed) return;
    require(report.reason == gpu::Report::kSizes, "a wrong reason");
    ++found;
    require(report.missing == 0 && report.taker == 1 && report.given == 20 && report.expected == 24,
            "wrong sizes");
  }));
  CHECK(found >= 1);
}

}  // namespace
}  // namespace dreamcomm::testing
