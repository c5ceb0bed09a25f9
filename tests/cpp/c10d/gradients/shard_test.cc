// A rank's rows of a parameter.
#include "c10d/gradients/shard.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/chunk.h>
#include <doctest.h>

namespace dreamcomm {
namespace {

TEST_CASE("the ranks' rows are those of torch.chunk") {
  for (const int world : {1, 2, 3, 4, 7}) {
    for (const std::int64_t rows : {0, 1, 2, 3, 5, 8, 13, 64}) {
      CAPTURE(world);
      CAPTURE(rows);
      const std::int64_t row_numel = 3;
      const at::Tensor parameter = at::arange(rows * row_numel).view({rows, row_numel});
      const std::vector<at::Tensor> chunks = at::chunk(parameter, world);
      std::int64_t end = 0;
      for (int rank = 0; rank < world; ++rank) {
        const ShardRange range = rows_of_rank(rows, row_numel, world, rank);
        const auto index = static_cast<std::size_t>(rank);
        const std::int64_t expected = index < chunks.size() ? chunks[index].numel() : 0;
        CHECK(range.count == expected);
        CHECK(range.begin == end);
        end += range.count;
      }
      CHECK(end == parameter.numel());
    }
  }
}

}  // namespace
}  // namespace dreamcomm
