// Which algorithm is selected for a call on GPUs.
#include <doctest.h>

#include "gpu/host/select_algorithm.h"

namespace dreamcomm::testing {
namespace {

TEST_CASE("small GPU sums use one shot, the smallest LL packets, large ones two shots") {
  const auto row = [](std::size_t bytes, int size) {
    return gpu::choose({.kind = Kind::kAllReduce, .bytes = bytes, .size = size, .most_blocks = 64})
        .row;
  };
  for (const int size : {2, 4, 8}) {
    CHECK(row(1024, size) == gpu::AlgorithmId::kFlagged);
    CHECK(row(std::size_t{128} << 10, size) == gpu::AlgorithmId::kStaged);
    CHECK(row(std::size_t{256} << 20, size) == gpu::AlgorithmId::kTwoShot);
  }
  const auto blocks = [](Kind kind, std::size_t bytes) {
    return gpu::choose({.kind = kind, .bytes = bytes, .size = 2, .most_blocks = 64}).grid.blocks;
  };
  CHECK(blocks(Kind::kAllReduce, 1024) == 1);
  CHECK(blocks(Kind::kAllReduce, std::size_t{1} << 30) == 64);
  CHECK(blocks(Kind::kAllToAll, 0) == 64);
}

TEST_CASE("large GPU calls of ranks with registered memory are made in place") {
  const auto row = [](Kind kind, std::size_t bytes) {
    return gpu::choose(
               {.kind = kind, .bytes = bytes, .size = 4, .most_blocks = 64, .registered = true})
        .row;
  };
  const std::size_t large = std::size_t{64} << 20;
  CHECK(row(Kind::kAllReduce, large) == gpu::AlgorithmId::kPush);
  CHECK(row(Kind::kReduce, large) == gpu::AlgorithmId::kPush);
  CHECK(row(Kind::kReduceScatter, large) == gpu::AlgorithmId::kInPlace);
  CHECK(row(Kind::kAllGather, large) == gpu::AlgorithmId::kInPlace);
  CHECK(row(Kind::kBroadcast, large) == gpu::AlgorithmId::kInPlace);
  CHECK(row(Kind::kAllReduce, 1024) == gpu::AlgorithmId::kFlagged);
  CHECK(row(Kind::kAllGather, 1024) == gpu::AlgorithmId::kStaged);
}

}  // namespace
}  // namespace dreamcomm::testing
