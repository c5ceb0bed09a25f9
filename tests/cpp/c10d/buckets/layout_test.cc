// A rank's rows of a parameter.
#include "c10d/buckets/layout.h"

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
        const RankRange range = elements_of_rank(parameter.sizes(), world, rank);
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

TEST_CASE("every rank has all of a scalar") {
  for (const int rank : {0, 1, 2}) {
    const RankRange range = elements_of_rank({}, 3, rank);
    CHECK(range.begin == 0);
    CHECK(range.count == 1);
  }
}

TEST_CASE("sections hold each rank's elements once, in the order of tensors") {
  const std::vector<std::int64_t> a{5, 2};
  const std::vector<std::int64_t> b{3};
  const Sections sections({a, b}, 2);
  CHECK(sections.width() == 6 + 2);
  std::vector<std::int64_t> places;
  std::vector<std::int64_t> begins;
  sections.of_rank(1, [&](std::size_t, std::int64_t place, const RankRange& elements) {
    places.push_back(place);
    begins.push_back(elements.begin);
  });
  CHECK(places == std::vector<std::int64_t>({0, 4}));
  CHECK(begins == std::vector<std::int64_t>({6, 2}));
}

}  // namespace
}  // namespace dreamcomm
