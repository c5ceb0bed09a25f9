// What the GPU's rows move, counted by the host target: a device counts nothing.
#include <doctest.h>

#include <atomic>
#include <memory>

#include "gpu_ranks.h"
#include "ranks.h"

namespace dreamcomm::testing {
namespace {

using gpu::RowId;

/// What all ranks together move in one all_reduce of `bytes`.
struct Total {
  std::atomic<std::size_t> moved{0};
};

std::size_t bytes_moved(int size, RowId row, std::size_t bytes, bool over_itself) {
  Total total;
  const std::unique_ptr<Gpus> gpus = make_gpus(size, 4096, 0);
  const Setup setup{.size = size, .heap_bytes = std::size_t{8} << 20};
  run_ranks(setup, [&](Communicator& comm) {
    const std::shared_ptr<std::byte> in = own_heap()->allocate(bytes);
    const std::shared_ptr<std::byte> out = own_heap()->allocate(bytes);
    const Block from{in.get(), bytes};
    const Block to{over_itself ? in.get() : out.get(), bytes};
    Request request;
    request.kind = Kind::kAllReduce;
    request.reduction = {.dtype = DType::kFloat32, .op = ReduceOp::kSum};
    request.in = std::span(&from, 1);
    request.out = std::span(&to, 1);
    total.moved += run_well(*gpus, comm, request, {.row = row, .blocks = 2, .lanes = 2}).moved;
  });
  return total.moved;
}

TEST_CASE("GPU rows move the bytes of their formulas") {
  for (const std::size_t n : {2U, 4U}) {
    const std::size_t s = 64 << 10;
    const int size = static_cast<int>(n);
    CHECK(bytes_moved(size, RowId::kOneShotInPlace, s, false) == n * (n + 1) * s);
    CHECK(bytes_moved(size, RowId::kPush, s, true) == 2 * n * s);
    CHECK(bytes_moved(size, RowId::kPull, s, false) == (3 * n + 1) * s);
    CHECK(bytes_moved(size, RowId::kStaged, s, true) == n * (n + 3) * s);
    CHECK(bytes_moved(size, RowId::kTwoShot, s, true) == (5 * n - 2) * s);
    CHECK(bytes_moved(size, RowId::kRing, s, true) == (6 * n - 4) * s);
  }
}

}  // namespace
}  // namespace dreamcomm::testing
