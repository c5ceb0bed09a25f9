// The GPU's rows move the bytes that the benchmark's formulas give. The host target counts them,
// because a device counts nothing.
#include <doctest.h>

#include <atomic>
#include <memory>
#include <vector>

#include "../../../benchmarks/gpu/rows.h"
#include "cpp/gpu/ranks.h"
#include "cpp/support/ranks.h"

namespace dreamcomm::testing {
namespace {

/// The blocks are contiguous.
std::vector<Block> blocks_at(std::byte* data, int count, std::size_t bytes) {
  std::vector<Block> blocks;
  for (int i = 0; i < count; ++i) {
    blocks.push_back({data + static_cast<std::size_t>(i) * bytes, bytes});
  }
  return blocks;
}

/// All ranks together, in one call whose largest tensor has `bytes`.
std::size_t bytes_moved(int size, const benchmark::Row& row, std::size_t bytes) {
  std::atomic<std::size_t> moved{0};
  const std::unique_ptr<Gpus> gpus = make_gpus(size, 4096, 0);
  run_ranks({.size = size, .heap_bytes = std::size_t{8} << 20}, [&](Communicator& comm) {
    const std::shared_ptr<std::byte> in = own_heap()->allocate(bytes);
    const std::shared_ptr<std::byte> out = own_heap()->allocate(bytes);
    const bool splits = row.kind == Kind::kReduceScatter;
    const bool joins = row.kind == Kind::kAllGather;
    const std::size_t block = splits || joins ? bytes / static_cast<std::size_t>(size) : bytes;
    const std::vector<Block> from = blocks_at(in.get(), splits ? size : 1, block);
    const std::vector<Block> to =
        blocks_at(row.over_itself ? in.get() : out.get(), joins ? size : 1, block);
    Request request;
    request.kind = row.kind;
    if (splits || row.kind == Kind::kAllReduce) {
      request.reduction = {.dtype = DType::kFloat32, .op = ReduceOp::kSum};
    }
    request.in = from;
    request.out = to;
    moved += run_well(*gpus, comm, request, {.row = row.row, .blocks = 2, .lanes = 2}).moved;
  });
  return moved;
}

TEST_CASE("GPU rows move the bytes of their formulas") {
  const std::size_t bytes = 64 << 10;
  for (const int size : {2, 4}) {
    for (const benchmark::Row& row : benchmark::kRows) {
      CAPTURE(size);
      CAPTURE(row.call);
      CAPTURE(row.name);
      CHECK(static_cast<double>(bytes_moved(size, row, bytes)) ==
            row.moved(size, static_cast<double>(bytes)));
    }
  }
}

TEST_CASE("GPU sums by LL packets move the bytes of their formula") {
  const benchmark::Row row{
      "all_reduce", "one_shot flagged", Kind::kAllReduce, gpu::AlgorithmId::kFlagged, false, true,
      nullptr};
  for (const std::size_t n : {2U, 4U}) {
    CHECK(bytes_moved(static_cast<int>(n), row, 8000) == (6 * (n - 1) + 2) * n * 8000);
  }
}

}  // namespace
}  // namespace dreamcomm::testing
